"""A motet served on a GPU: random weights of Llama-3-8B's shape, adapters uploaded over HTTP, streams at once.

Writes the base (16 GB) and the adapters into a folder that is deleted again, starts `motet serve`, and prints what is
measured as it comes: seconds until ready, uploads and the first token after them, tokens per second, times to the first
token and between tokens, and how long the gang's steps took. Then one long prompt arrives beside the streams. The last
line is JSON. Streams are read by several processes, as one could not follow a GPU. Needs all that motet needs.
`--dry`: a tiny base on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from motet.benchmarks.gpu.engine_bench import LLAMA_3_8B, TINY
from motet.cluster.launch.local_serve import free_ports
from motet.cluster.launch_secrets import OPERATOR_KEY_FILE

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "base"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
KEY = "key-of-the-benchmark"
HEADERS = {"Authorization": f"Bearer {KEY}"}
RANK = 16
PATIENCE_S = 600.0
NUM_CLIENTS = 4  # processes
STEP_METRICS = ("motet_engine_steps_total", "motet_engine_busy_seconds_total")


@dataclass
class Stream:
    """When it was sent, and when each event with a token came, in seconds of the clock that all processes share."""

    sent_at: float
    came_at: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.came_at[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.came_at)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="a tiny base on a CPU, to try the program itself")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64, 128], help="streams")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the prompt that arrives beside the streams")
    parser.add_argument("serve", nargs="*", help="options of motet serve, after --")
    arguments = parser.parse_args()
    if arguments.dry:
        arguments.prompt, arguments.tokens, arguments.long = 40, 20, 60
    with tempfile.TemporaryDirectory(prefix="motet-served-") as name:
        folder = Path(name)
        config = (TINY | {"vocab_size": 1200}) if arguments.dry else LLAMA_3_8B
        write_base(folder / "base", config, "cpu" if arguments.dry else "cuda")
        adapters = [folder / f"adapter-{index}" for index in range(arguments.adapters)]
        for adapter in adapters:
            write_adapter(adapter, config)
        print("written", flush=True)
        print(json.dumps(_served(arguments, folder, adapters)))


def _served(arguments: argparse.Namespace, folder: Path, adapters: list[Path]) -> dict[str, Any]:
    (port,) = free_ports(1)
    motet_path, base, data = str(Path(sys.executable).with_name("motet")), str(folder / "base"), folder / "data"
    command = [motet_path, "serve", base, "--name", "base", "--port", str(port)]
    command += ["--data-dir", str(data), "--key", f"acme={KEY}"]
    command += ["--device", "cpu", "--pool-bytes", "200MiB"] if arguments.dry else ["--device", "cuda"]
    log, begun = folder / "log", time.monotonic()
    with log.open("w") as output:
        motet = subprocess.Popen([*command, *arguments.serve], stdout=output, stderr=subprocess.STDOUT)
    try:
        while "ready http" not in log.read_text():
            if motet.poll() is not None or time.monotonic() - begun > PATIENCE_S:
                sys.exit(f"motet is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        found: dict[str, Any] = {"ready_s": round(time.monotonic() - begun, 1)}
        print(found, flush=True)
        with ProcessPoolExecutor(NUM_CLIENTS, mp_context=get_context("spawn")) as clients:
            list(clients.map(time.sleep, [1.0] * NUM_CLIENTS))  # all are there before the first streams
            load = Load(f"http://127.0.0.1:{port}", (data / OPERATOR_KEY_FILE).read_text().strip(), clients)
            found |= _measured(arguments, load, adapters)
        return found
    finally:
        motet.terminate()
        motet.wait(60)


def _measured(arguments: argparse.Namespace, load: Load, adapters: list[Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    uploads, firsts = [], []
    with httpx.Client(base_url=load.url, headers=HEADERS, timeout=PATIENCE_S) as client:
        for adapter in adapters:
            begun = time.monotonic()
            files = {path.name: path.read_bytes() for path in adapter.iterdir()}
            client.post("/v1/adapters", data={"name": adapter.name}, files=files).raise_for_status()
            uploads.append(time.monotonic() - begun)
            firsts.append(load.streams([adapter.name], 100, 4)[0].first_s)
    found["upload_s"] = round(statistics.median(uploads), 3)
    found["first_token_after_s"] = round(statistics.median(firsts), 3)
    print(found, flush=True)
    names = [adapter.name for adapter in adapters]
    for number in arguments.at_once:
        for what, models in (("base", ["base"]), (f"{len(names)} adapters", names)):
            requested = [models[at % len(models)] for at in range(number)]
            before = load.steps()
            streams = load.streams(requested, arguments.prompt, arguments.tokens)
            wall_s = max(each.came_at[-1] for each in streams) - min(each.sent_at for each in streams)
            said = summary(streams, wall_s) | steps_between(before, load.steps())
            found[f"{number} at once, {what}"] = said
            print(f"{number} at once, {what}: {said}", flush=True)
    number, models = arguments.at_once[-1], names or ["base"]
    running = load.begin([models[at % len(models)] for at in range(number)], arguments.prompt, arguments.tokens)
    time.sleep(wall_s / 2)
    (long,) = load.streams(["base"], arguments.long, 1)
    streams = [stream for each in running for stream in each.result()]
    beside = [
        after - before
        for stream in streams
        for before, after in pairwise(stream.came_at)
        if after > long.sent_at and before < long.came_at[0]
    ]
    longest = round(1e3 * max(beside), 1) if beside else None
    found["long prompt"] = {"first_token_s": round(long.first_s, 3), "longest_gap_ms": longest}
    print(found["long prompt"], flush=True)
    return found


@dataclass(frozen=True)
class Load:
    """What is sent to a motet at `url` by the processes of `clients`."""

    url: str
    operator_key: str
    clients: ProcessPoolExecutor

    def begin(self, models: list[str], prompt: int, tokens: int) -> list[Future[list[Stream]]]:
        """A stream for each of `models`, all at once, `prompt` random tokens and an answer of `tokens` each."""
        parts = [models[at::NUM_CLIENTS] for at in range(NUM_CLIENTS)]
        return [self.clients.submit(_streams, self.url, part, prompt, tokens) for part in parts if part]

    def streams(self, models: list[str], prompt: int, tokens: int) -> list[Stream]:
        return [stream for each in self.begin(models, prompt, tokens) for stream in each.result()]

    def steps(self) -> dict[str, float]:
        """Steps so far, and the seconds that they took."""
        headers = {"Authorization": f"Bearer {self.operator_key}"}
        response = httpx.get(f"{self.url}/metrics", headers=headers, timeout=PATIENCE_S).raise_for_status()
        values = dict.fromkeys(STEP_METRICS, 0.0)
        for line in response.text.splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in values:
                values[name] += float(line.rsplit(" ", 1)[1])
        return values


def steps_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    num_steps, busy_s = (after[name] - before[name] for name in STEP_METRICS)
    return {"steps": num_steps, "busy_s": round(busy_s, 2)}


def _streams(url: str, models: list[str], prompt: int, tokens: int) -> list[Stream]:
    """In a process of its own: completions of random prompts. Raises RuntimeError if one fails."""

    async def all_of() -> list[Stream]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=PATIENCE_S, limits=limits) as client:
            return await asyncio.gather(*(_stream(client, model, prompt, tokens) for model in models))

    return asyncio.run(all_of())


async def _stream(client: httpx.AsyncClient, model: str, prompt: int, tokens: int) -> Stream:
    body = {
        "model": model,
        "prompt": [random.randrange(4, 1000) for _ in range(prompt)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    found, last = Stream(time.monotonic()), ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found.came_at.append(time.monotonic())
                last = line
    found.came_at.pop()  # that of the usage
    usage = json.loads(last.removeprefix("data: ")).get("usage")
    if usage is None or not found.came_at:
        raise RuntimeError(f"a stream failed: {last}")
    found.num_tokens = usage["completion_tokens"]
    return found


def summary(streams: list[Stream], wall_s: float) -> dict[str, float]:
    firsts, gaps = sorted(each.first_s for each in streams), sorted(gap for each in streams for gap in each.gaps_s)
    return {
        "tokens_per_s": round(sum(each.num_tokens for each in streams) / wall_s, 1),
        "first_token_p50_s": round(statistics.median(firsts), 3),
        "first_token_last_s": round(firsts[-1], 3),
        "gap_p50_ms": round(statistics.median(gaps) * 1e3, 2),
        "gap_p99_ms": round(gaps[len(gaps) * 99 // 100] * 1e3, 2),
    }


def write_base(folder: Path, config: dict[str, Any], device: str) -> None:
    """The demo's tokenizer, and random weights that the device draws, four layers in a file."""
    folder.mkdir()
    ids = {key: value for key, value in json.loads((DEMO / "config.json").read_text()).items() if key.endswith("_id")}
    (folder / "config.json").write_text(json.dumps(config | ids | {"model_type": "llama", "hidden_act": "silu"}))
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)
    # Every token has a text, so that each is sent when it is there.
    tokenizer = json.loads((DEMO / TOKENIZER_FILES[0]).read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"t{token}": token for token in set(range(config["vocab_size"])) - set(vocab.values())}
    (folder / TOKENIZER_FILES[0]).write_text(json.dumps(tokenizer))
    hidden, norm = config["hidden_size"], torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    outer = {f"{name}.weight": (config["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")}
    files = [{name: drawn(shape, device) for name, shape in outer.items()} | {"model.norm.weight": norm}]
    places = dict.fromkeys(files[0], 0)
    save_file(files.pop(), folder / "model-0.safetensors", metadata={"format": "pt"})
    for first in range(0, config["num_hidden_layers"], 4):
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(first, min(first + 4, config["num_hidden_layers"])):
            at = f"model.layers.{layer}"
            tensors |= {f"{at}.{name}.weight": drawn(sides[::-1], device) for name, sides in linears(config).items()}
            norms = ("input_layernorm", "post_attention_layernorm")
            tensors |= {f"{at}.{name}.weight": norm.clone() for name in norms}
        save_file(tensors, folder / f"model-{first + 1}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, first + 1)
    index = {"metadata": {}, "weight_map": {name: f"model-{place}.safetensors" for name, place in places.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_adapter(folder: Path, config: dict[str, Any]) -> None:
    """An adapter of rank 16 on all seven projections, in PEFT's format."""
    folder.mkdir()
    names = sorted(name.split(".")[1] for name in linears(config))
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": names, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(said | {"bias": "none"}))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_in, num_out) in linears(config).items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = drawn((RANK, num_in), "cpu")
            tensors[f"{at}.lora_B.weight"] = drawn((num_out, RANK), "cpu")
    save_file(tensors, folder / "adapter_model.safetensors")


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by the name under a layer."""
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }


def drawn(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return (torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02).cpu()


if __name__ == "__main__":
    main()
