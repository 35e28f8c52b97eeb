"""What a training loop sees that uploads each step's LoRA as a new version of one name.

First, a base of Llama-3-8B's widths, with `--layers` of its 32, and versions of rank 16 on its seven linears (21 MB
with 8 layers): from the beginning of an upload to the new version's first token, less the base's own first token for
the same prompt, beside what hashing, writing with one `fsync`, and reading the same bytes take one after the other on
this disk. Then the same for `POST /v1/load_lora_adapter` from a shared folder, beside reading and hashing.

Second, two gangs of a small base with versions that emit only tokens of their own (`tests/rigs/version_markers.py`),
under uploads, deletions and kill -9 of gangs: how many of the tokens were not of the version that the answer names, or
of one older than what was acknowledged before it was asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import torch
from safetensors.torch import save, save_file

from motet.benchmarks.rigs.published_bases import BASES
from motet.benchmarks.rigs.trained_tokenizer import write_tokenizer
from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.running_motet import BASE, DEMO, RunningMotet, running_motet
from motet.tests.rigs.version_markers import CONFIG_FILE, TENSORS_FILE, files_of, num_wrong, write_base

RANK, NUM_TOKENS, VOCAB_SIZE = 16, 64, 16_000
CONFIG = BASES["Llama-3-8B"]
HIDDEN, INNER = CONFIG["hidden_size"], CONFIG["intermediate_size"]
KV = HIDDEN // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
LINEARS = {  # name under the layer: (in, out)
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
NUM_ASKERS, MAX_TOKENS, KILL_EVERY_S, DELETE_EVERY = 16, 200, 15.0, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="of the base whose versions are uploaded (default 8)")
    parser.add_argument("--rounds", type=int, default=15, help="uploads of each way (default 15)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="whose version is checked (default 1000000)")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        figures |= upload_times(Path(folder), arguments.layers, arguments.rounds)
        figures |= checked_tokens(Path(folder), arguments.tokens)
    print(json.dumps(figures))


def upload_times(folder: Path, num_layers: int, num_rounds: int) -> dict[str, float]:
    base, shared = _write_base(folder / "base", num_layers), folder / "shared"
    shared.mkdir()
    config, tensors = _adapter(num_layers)
    (shared / CONFIG_FILE).write_bytes(config)
    options = ["--adapter-folders", str(shared), "--threads", "2", "--dtype", "bfloat16"]
    over_base: dict[str, list[float]] = {"upload": [], "folder": []}
    floors: dict[str, list[float]] = {"upload": [], "folder": []}
    with (
        running_motet(folder / "served", free_ports(1)[0], *options, pool_bytes="2GiB", base=base) as motet,
        motet.http() as http,
    ):
        for number, way in itertools.product(range(-2, num_rounds), over_base):  # two to warm up
            version = _changed(tensors, 2 * number + (way == "upload") + 5)
            if way == "folder":
                (shared / TENSORS_FILE).write_bytes(version)
            prompt = [random.randrange(1, VOCAB_SIZE) for _ in range(NUM_TOKENS)]
            base_s = _first_token_s(http, BASE, prompt)
            began = time.perf_counter()
            answer = _upload(http, config, version) if way == "upload" else _load(http, shared)
            if answer.status_code not in (200, 201):
                raise RuntimeError(f"{way}: {answer.status_code} {answer.text}")
            _first_token_s(http, way, prompt)
            taken_s = time.perf_counter() - began
            if number >= 0:
                over_base[way].append(taken_s - base_s)
                floors[way].append(
                    _disk_s(version, folder / "floor") if way == "upload" else _reading_s(shared / TENSORS_FILE)
                )
    shutil.rmtree(base)
    figures: dict[str, float] = {"megabytes": round(len(tensors) / 1e6, 1)}
    for way, name in (("upload", "upload_to_first_token"), ("folder", "folder_to_first_token")):
        taken_ms, floor_ms = (1e3 * statistics.median(each[way]) for each in (over_base, floors))
        print(f"{name}: {taken_ms:.0f} ms over the base's own first token; floor {floor_ms:.0f} ms", flush=True)
        figures |= {f"{name}_ms": round(taken_ms), f"{name}_limit_ms": round(1.2 * floor_ms + 50)}
    return figures


def checked_tokens(folder: Path, num_tokens: int) -> dict[str, float]:
    vocab_size = len(json.loads((DEMO / "base" / "tokenizer.json").read_text())["model"]["vocab"])
    base = write_base(folder / "marked", vocab_size)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "base" / file, base)
    options = ["--gangs", "2", "--dtype", "float32", "--threads", "1"]
    with running_motet(folder / "marked-data", free_ports(1)[0], *options, pool_bytes="24MiB", base=base) as motet:
        traffic = MarkedTraffic(motet, vocab_size, num_tokens)
        traffic.run()
    print(f"{dict(traffic.counts)}", flush=True)
    return {"marked_tokens": traffic.counts["tokens"], "wrong_version_tokens": traffic.counts["wrong_tokens"]}


class MarkedTraffic:
    """Clients that ask for the newest version while it is uploaded, deleted, and gangs are killed."""

    def __init__(self, motet: RunningMotet, vocab_size: int, num_tokens: int) -> None:
        self.counts: Counter[str] = Counter()
        self._motet, self._num_tokens = motet, num_tokens
        rng = random.Random(0)
        self._prefixes = [[rng.randrange(1, vocab_size) for _ in range(length)] for length in (40, 150, 400, 700)]
        self._acknowledged, self._lock = 0, threading.Lock()
        self._is_over, self._failures = threading.Event(), list[BaseException]()

    def run(self) -> None:
        with self._motet.http() as http:
            self._upload(http, 1)
        work: list[Callable[[], None]] = [self._upload_on, self._kill_on]
        work += [partial(self._ask_on, seed) for seed in range(NUM_ASKERS)]
        threads = [threading.Thread(target=self._guarded, args=(each,)) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # all others stop, and `run` raises it
            self._failures.append(error)
            self._is_over.set()

    def _upload(self, http: httpx.Client, version: int) -> None:
        answer = http.post("/v1/adapters", data={"name": "policy"}, files=files_of(version))
        if answer.status_code != 201 or answer.json()["version"] != version:
            raise RuntimeError(f"version {version}: {answer.status_code} {answer.text}")
        self._acknowledged = version
        self.counts["uploads"] += 1

    def _upload_on(self) -> None:
        with self._motet.http() as http:
            while not self._is_over.wait(0.05):
                if self._acknowledged % DELETE_EVERY == 0:
                    http.delete("/v1/adapters/policy").raise_for_status()
                    self.counts["deletions"] += 1
                self._upload(http, self._acknowledged + 1)

    def _kill_on(self) -> None:
        while not self._is_over.wait(KILL_EVERY_S):
            gangs = self._motet.gang_processes()
            if len(gangs) == 2:
                random.choice(gangs).kill()
                self.counts["kills"] += 1

    def _ask_on(self, seed: int) -> None:
        rng = random.Random(seed)
        with self._motet.http() as http:
            while not self._is_over.is_set():
                prefix = rng.choice(self._prefixes)
                prompt = [*prefix[: rng.randrange(1, len(prefix))], rng.randrange(1, 200)]
                body = {"prompt": prompt, "max_tokens": rng.randrange(1, MAX_TOKENS), "temperature": rng.choice((0, 1))}
                acknowledged = self._acknowledged
                answer = http.post(
                    "/v1/completions", json={"model": "policy", "ignore_eos": True, "return_token_ids": True, **body}
                )
                if answer.status_code == 404:  # between a deletion and the next upload
                    continue
                if answer.status_code != 200:
                    raise RuntimeError(f"{answer.status_code} {answer.text}")
                version = int(answer.headers["x-motet-version"].removeprefix("policy@"))
                token_ids = answer.json()["choices"][0]["token_ids"]
                with self._lock:
                    self.counts["answers"] += 1
                    self.counts["tokens"] += len(token_ids)
                    self.counts["wrong_tokens"] += (
                        len(token_ids) if version < acknowledged else num_wrong(token_ids, version)
                    )
                    if self.counts["tokens"] >= self._num_tokens:
                        self._is_over.set()


def _write_base(folder: Path, num_layers: int) -> Path:
    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": num_layers, "vocab_size": VOCAB_SIZE, "model_type": "llama"}
    more = {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**config, **more, "rms_norm_eps": 1e-5}))
    write_tokenizer(folder, VOCAB_SIZE)
    noise = {size: (torch.randn(size[1], size[0]) * size[0] ** -0.5).bfloat16() for size in {*LINEARS.values()}}
    tensors = {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    tensors["model.embed_tokens.weight"] = (torch.randn(VOCAB_SIZE, HIDDEN) * 0.05).bfloat16()
    for layer in range(num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, size in LINEARS.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = noise[size].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _adapter(num_layers: int) -> tuple[bytes, bytes]:
    targets = [name.rpartition(".")[2] for name in LINEARS]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    tensors = {}
    for layer in range(num_layers):
        for name, (num_in, num_out) in LINEARS.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(RANK, num_in) * 0.02).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(num_out, RANK) * 0.02).bfloat16()
    return json.dumps(config).encode(), save(tensors)


def _changed(tensors: bytes, number: int) -> bytes:
    """Another adapter: the last of its numbers, in bfloat16, is a small one of its own."""
    return tensors[:-2] + (0x3C00 + number).to_bytes(2, "little")


def _upload(http: httpx.Client, config: bytes, tensors: bytes) -> httpx.Response:
    files = {CONFIG_FILE: (CONFIG_FILE, config), TENSORS_FILE: (TENSORS_FILE, tensors)}
    return http.post("/v1/adapters", data={"name": "upload"}, files=files)


def _load(http: httpx.Client, folder: Path) -> httpx.Response:
    body = {"lora_name": "folder", "lora_path": str(folder), "load_inplace": True}
    return http.post("/v1/load_lora_adapter", json=body)


def _first_token_s(http: httpx.Client, model: str, prompt: list[int]) -> float:
    began = time.perf_counter()
    answer = http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True})
    if answer.status_code != 200:
        raise RuntimeError(f"{model}: {answer.status_code} {answer.text}")
    return time.perf_counter() - began


def _disk_s(data: bytes, path: Path) -> float:
    """Hashing, writing with one fsync, and reading these bytes, one after the other."""
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.read_bytes()
    return time.perf_counter() - began


def _reading_s(path: Path) -> float:
    began = time.perf_counter()
    hashlib.sha256(path.read_bytes()).digest()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
