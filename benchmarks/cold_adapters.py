"""Many adapters that are neither in the pool nor in host memory, each asked for once, over what the machine must do.

The floor is what these requests cannot do without, one after the other, each part measured in the same round:

- their tokens: the same requests for the base;
- their bytes: the packed files read once, by as many threads as the engine has;
- their matrices: the bytes of an adapter once for each step that computes a row of it, at the rate at which the same
  threads read memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from motet.benchmarks.many_adapters import StoredAdapter, write_store
from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

POOL_BYTES, HOST_BYTES = 1 << 29, 64 << 20  # far less than the adapters: each round finds none
NUM_PROMPT, MAX_TOKENS = 16, 8
_READ_BYTES = 1 << 30  # of memory, to know how fast it is read
_PIECE_BYTES = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, default=500, help="asked for once each (default 500)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of the engine (default 2)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        store = Path(folder) / "store"
        adapters = write_store(store, model_path, arguments.adapters, BLOCK_SIZE)
        config = MotetConfig.of(
            model_path=model_path,
            data_dir=store.parent,
            pool_bytes=POOL_BYTES,
            host_bytes=HOST_BYTES,
            block_size=BLOCK_SIZE,
            num_threads=arguments.threads,
        )
        engine = build_engine(config.engine)
        ids = itertools.count()
        try:
            answered_s(engine, adapters[: len(adapters) // 8], ids)  # builds kernels
            rounds = [one_round(engine, adapters, store, arguments.threads, ids) for _ in range(arguments.rounds)]
        finally:
            engine.close()
    names = ("cold", "tokens", "bytes", "matrices")
    for each in rounds:
        print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in zip(names, each, strict=True)), flush=True)
    over_floor = statistics.median(cold / sum(floor) for cold, *floor in rounds)
    print(json.dumps({"benchmark": "cold_adapters", "cold_adapters_over_floor": round(over_floor, 2)}))


def one_round(
    engine: Engine, adapters: Sequence[StoredAdapter], store: Path, num_threads: int, ids: itertools.count[int]
) -> tuple[float, float, float, float]:
    """Seconds with the adapters, and of the three parts of the floor."""
    cold_s = answered_s(engine, adapters, ids)
    tokens_s = answered_s(engine, [None] * len(adapters), ids)
    files = list(store.glob("*/*/*.packed"))
    bytes_s = read_s(files, num_threads)
    num_bytes = sum(path.stat().st_size for path in files) * MAX_TOKENS  # the prompt is one step, which gives a token
    return cold_s, tokens_s, bytes_s, num_bytes / memory_rate(num_threads)


def answered_s(engine: Engine, adapters: Sequence[StoredAdapter | None], ids: itertools.count[int]) -> float:
    """From asking for all at once to the last answer."""
    chance = random.Random(0)
    began = time.perf_counter()
    for adapter in adapters:
        request = SequenceRequest(
            sequence_id=next(ids),
            prompt_token_ids=[chance.randrange(1, random_model.VOCAB_SIZE) for _ in range(NUM_PROMPT)],
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
            tenant="benchmark",
            adapter=None if adapter is None else adapter.ref,
        )
        engine.receive(Submit(request))
    while engine.has_work():
        for update in engine.step():
            if update.error is not None:
                raise RuntimeError(update.error.message)
    return time.perf_counter() - began


def read_s(files: Sequence[Path], num_threads: int) -> float:
    """Reading them, a piece after the other into one buffer of each thread."""

    def read(path: Path) -> None:
        buffer = bytearray(_PIECE_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    began = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(read, files))
    return time.perf_counter() - began


def memory_rate(num_threads: int) -> float:
    """Bytes a second that are read and added up."""
    numbers, before = torch.zeros(_READ_BYTES // 4), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        taken_s = []
        for _ in range(4):
            began = time.perf_counter()
            numbers.sum()
            taken_s.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return _READ_BYTES / min(taken_s)


if __name__ == "__main__":
    main()
