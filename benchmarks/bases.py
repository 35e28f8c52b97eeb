"""Which of 36 families that tenants fine-tune are served: transformers' default config of each, read as a base's.

A family counts if its config.json is accepted. Whether it is computed right is tested by `tests/workers/`, in
`test_exactness.py` and `test_text_towers.py`.

Then what weights of eight and four bits gain on this CPU: decodes per second of a step of one, 8 and 64 sequences over
those in bfloat16, in turns, and the memory of the layers' weights, of a dense base and of gpt-oss's experts; steps of
bases with a recurrent state or latents over those of a dense base that reads as many bytes; and the demo model's
perplexity in int8 over that in float32. With `--before` also steps of an ordinary base
over those of another checkout's code, by `free_decodes.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto

from motet.benchmarks.rigs.mixer_steps import BASES, steps_over_dense
from motet.benchmarks.rigs.quantised_steps import measure
from motet.tests.rigs.demo_perplexity import perplexity
from motet.workers.models.config import ModelConfig

_NAMES = """
    Llama Mistral Ministral3 Mistral3 Mistral4 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5Text Qwen3_5 Qwen3_5Moe Qwen3VL
    Gemma2 Gemma3Text Gemma3 Gemma4Text Gemma4 GptOss Llama4 Phi3 Mixtral Granite GraniteMoeHybrid Olmo3 SmolLM3 Glm4
    Glm4Moe DeepseekV3 NemotronH Cohere2 SeedOss Exaone4 Lfm2 FalconH1 MiniMaxM2
"""
# What every release says and the default config does not: Granite 4's has no layer with attention.
_PUBLISHED = {"GraniteMoeHybrid": {"layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 26]}}


def architecture_of(model_type: str) -> str:
    """As published: the model that takes pictures too, where there is one."""
    whole = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    return str(whole or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def problem_of(family: str, folder: Path) -> str:
    """Why it is refused; empty: it is served."""
    config = getattr(transformers, f"{family}Config")(**_PUBLISHED.get(family, {}))
    config.architectures = [architecture_of(config.model_type)]
    config.save_pretrained(folder)
    try:
        ModelConfig.from_folder(folder)
    except ValueError as error:
        return str(error).partition(": ")[0]
    return ""


def ordinary_over_before(before: Path) -> dict[str, float]:
    """By number of sequences that decode; above 1 this code is slower."""
    command = [sys.executable, str(Path(__file__).parent / "free_decodes.py"), "--before", str(before)]
    printed = subprocess.run([*command, "--repetitions", "9"], check=True, capture_output=True, text=True).stdout
    figures = json.loads(printed.splitlines()[-1])
    return {f"ordinary_over_before_{number}": round(1 / figures[f"speed_ratio_{number}"], 3) for number in (1, 64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of other code, in a folder named motet")
    before_path = parser.parse_args().before
    num_served = 0
    for family in _NAMES.split():
        with tempfile.TemporaryDirectory() as folder:
            problem = problem_of(family, Path(folder))
        num_served += not problem
        print(f"{family:<18}{problem or 'served'}")
    figures = measure()
    with tempfile.TemporaryDirectory() as folder:
        before, after = (perplexity(Path(folder) / kind, 400, weights_dtype=kind) for kind in ("dtype", "int8"))
    for kind in BASES:
        figures |= {f"{kind}_over_dense_{step}": round(ratio, 3) for step, ratio in steps_over_dense(kind).items()}
    figures["int8_perplexity"] = round(after / before, 5)
    figures["hybrid_over_dense"] = figures["delta_over_dense_decode_1"]
    if before_path is not None:
        figures |= ordinary_over_before(before_path)
    for name, figure in figures.items():
        print(f"{name:<32}{figure:g}")
    print(json.dumps({"families_served": num_served, **figures}))


if __name__ == "__main__":
    main()
