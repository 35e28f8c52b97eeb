"""guidellm: a short benchmark, by its command."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from demo import BASE, FOLDER, KEY, URL


def benchmark() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("guidellm")),
            "run",
            "--backend", f"kind=openai_http,target={URL},model={BASE},api_key={KEY}",
            "--profile", "kind=synchronous",
            "--constraint", "kind=max_requests,count=3",
            "--tokenizer", f"kind=huggingface_auto,model={FOLDER}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--output", f"kind=json,path={folder}/report.json",
            "--disable-console",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode or "successful=3 errored=0" not in done.stderr + done.stdout:
            raise ValueError((done.stderr or done.stdout)[-400:])


CHECKS = (benchmark,)
