"""The demo base with everything on, on the device, against the tokens of the CPU.

Tiers behind a small pool, adapters, prompts of many lengths in one batch, shared beginnings, draws, penalties, biases
and log-probabilities; twice, so that the second round takes its prefixes and adapters back from behind the pool. The
numbers of a GPU in bfloat16 are not those of a CPU in float32: tokens are compared up to the first that differs, which
must be a near tie. What makes the host wait is counted by `torch.cuda.set_sync_debug_mode`. Needs what motet needs, Ray
and the web server aside.
"""

from __future__ import annotations

import random
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout, Dtype
from motet.adapters.store.store import AdapterStore
from motet.benchmarks.gpu.machine import Machine, Row
from motet.cluster.config import part_config
from motet.cluster.settings.settings import Settings
from motet.workers.config import EngineConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.models.config import ModelConfig
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, Submit, TokenLogprobs

ROOT = Path(__file__).resolve().parents[2]
BASE, ADAPTERS = ROOT / "examples" / "demo" / "base", ROOT / "examples" / "demo" / "adapters"
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of log-probabilities, by the dtype of the device
_PATIENCE_S = 300.0
_PRODUCT = ("kernels/", "adapters/", "workers/")
Record = dict[str, Any]


@dataclass
class Answer:
    """`is_greedy`: the same tokens must come, near ties aside; draws of other numbers may differ at once."""

    is_greedy: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


def check_demo(machine: Machine) -> Iterator[Record]:
    """A row for what greedy sequences and one for what drawn ones show, and the lines that made the host wait."""
    with tempfile.TemporaryDirectory(prefix="motet-demo-") as folder:
        expected, _, _, _ = answered("cpu", "float32", Path(folder) / "cpu", machine.is_dry)
        dtype: Dtype = "float32" if machine.dtype == torch.float32 else "bfloat16"
        device, there = machine.device.type, Path(folder) / "gpu"
        answers, num_steps, num_moved, waits = answered(device, dtype, there, machine.is_dry)
    if machine.is_dry:  # the kernels' twins wait; Triton's kernels have nothing to wait for
        waits = Counter({line: count for line, count in waits.items() if not line.startswith("kernels/plain/")})
    tolerance = _TOLERANCE[machine.dtype]
    for name, greedy in (("greedy", True), ("drawn", False)):
        pairs = [(ours, theirs) for ours, theirs in zip(answers, expected, strict=True) if ours.is_greedy == greedy]
        error, note = compared(pairs, tolerance)
        row = Row("demo base", f"{len(pairs)} {name} sequences", error, tolerance, note=note)
        yield {"kind": "row", **asdict(row), "is_wrong": row.is_wrong}
    yield {"kind": "fact", "name": "pages moved behind the pool and back", "value": num_moved}
    yield {"kind": "waits", "num_steps": num_steps, "lines": dict(waits.most_common(20))}


def compared(pairs: Sequence[tuple[Answer, Answer]], tolerance: float) -> tuple[float, str]:
    """The largest difference of log-probabilities up to the first token that differs, and what is to be said of them.

    Where greedy tokens differ, the difference is what the other one's lead was. NaN if a sequence failed.
    """
    error, num_equal = 0.0, 0
    for ours, theirs in pairs:
        if ours.error is not None or theirs.error is not None or len(ours.token_ids) != len(theirs.token_ids):
            return float("nan"), f"a sequence failed: {ours.error or theirs.error or 'tokens are missing'}"
        for token, other, own, reference in zip(
            ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True
        ):
            if token != other:
                if ours.is_greedy:
                    known = dict(zip(reference.top_ids, reference.top_logprobs, strict=True))
                    error = max(error, reference.chosen - known.get(token, float("-inf")))
                break
            error = max(error, abs(own.chosen - reference.chosen))
        else:
            num_equal += 1
    return error, f"{num_equal} of {len(pairs)} alike in all tokens"


def answered(device: str, dtype: Dtype, folder: Path, is_dry: bool) -> tuple[list[Answer], int, int, Counter[str]]:
    """All answers of a new engine, its steps, how many pages it moved behind its pool and back, and who waited."""
    model, store = ModelConfig.from_folder(BASE), AdapterStore(folder / "store")
    settings = Settings()
    layout = AdapterLayout(model.shape, model.slab(settings.memory.block_size), dtype)
    refs = dict(_stored(store, model, layout, 2 if is_dry else 4))
    page_bytes = model.num_layers * model.slab(settings.memory.block_size) * (4 if dtype == "float32" else 2)
    largest = max(layout.num_pages(ref.module_ranks) for ref in refs.values())
    num_requests, num_tokens = (5, 4) if is_dry else (24, 16)
    requests = list(_requests(refs, num_requests, num_tokens))
    longest = max(len(request.prompt_token_ids) for request in requests) + num_tokens
    config = part_config(
        EngineConfig,
        settings,
        model_path=BASE,
        store_path=folder / "store",
        kv_disk_path=folder / "kv",
        device=device,
        dtype=dtype,
        pool_bytes=(largest + 4 * (longest // settings.memory.block_size + 1)) * page_bytes,
        host_bytes=sum(layout.num_pages(ref.module_ranks) for ref in refs.values()) * page_bytes,
        kv_host_bytes=30 * page_bytes,
        kv_disk_bytes=1000 * page_bytes,
        max_tokens_per_step=128,
        max_num_sequences=8,
        reasons={},
        pool_sharers=1,
        measures_threads=False,
        num_threads=1 if is_dry else 4,
    )
    engine = build_engine(config)
    try:
        waits: Counter[str] = Counter()
        with nullcontext() if device == "cpu" else counted_waits(waits):
            answers = [answer for again in range(2) for answer in _ask(engine, requests, again * len(requests))]
        counters = engine.load().counters
        return answers, counters.num_steps, counters.num_pages_out + counters.num_pages_in, waits
    finally:
        engine.close()


@contextmanager
def counted_waits(lines: Counter[str]) -> Iterator[None]:
    """Counts the product's lines at which the host waits for the device, as torch sees it, in all threads."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def shown(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                show(message, category, filename, lineno, *rest)
                return
            stack = [(_in_checkout(at.filename), at.lineno) for at in traceback.extract_stack()]
            ours = [f"{name}:{line}" for name, line in stack if name is not None and name.startswith(_PRODUCT)]
            lines[ours[-1] if ours else f"{filename}:{lineno}"] += 1

        warnings.showwarning = shown  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _in_checkout(filename: str) -> str | None:
    """The name from the checkout's root, however it was imported; None: it is of another package."""
    path = Path(filename).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def _stored(
    store: AdapterStore, model: ModelConfig, layout: AdapterLayout, count: int
) -> Iterator[tuple[str, AdapterRef]]:
    for folder in sorted(ADAPTERS.iterdir())[:count]:
        content = validate(
            (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", model.shape
        )
        store.put(content, [layout])
        yield folder.name, AdapterRef(content.digest, content.module_ranks)


def _requests(refs: Mapping[str, AdapterRef], count: int, num_tokens: int) -> Iterator[SequenceRequest]:
    """Half of them begin alike."""
    generator = random.Random(16)
    vocabulary = range(4, 1024)  # beyond the special tokens
    beginning = generator.choices(vocabulary, k=40)
    ways: tuple[Mapping[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "top_k": 7, "min_p": 0.01, "logit_bias": {5: 2.0, 9: -1.0}},
        {"temperature": 0.9, "presence_penalty": 0.5},
    )
    adapters = (None, *refs.values())
    for index in range(count):
        prompt = generator.choices(vocabulary, k=generator.choice((3, 17, 60, 150)))
        way = SamplingParams(max_tokens=num_tokens, ignore_eos=True, num_logprobs=5, seed=index, **ways[index % 5])
        yield SequenceRequest(
            sequence_id=index,
            prompt_token_ids=(beginning if index % 2 else []) + prompt,
            sampling=way,
            tenant="first-run",
            adapter=adapters[index % len(adapters)],
        )


def _ask(engine: Engine, requests: Sequence[SequenceRequest], first_id: int) -> list[Answer]:
    answers = {}
    for request in requests:
        sequence_id = first_id + request.sequence_id
        answers[sequence_id] = Answer(request.sampling.temperature == 0 and not request.sampling.has_penalty)
        engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=sequence_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling=request.sampling,
                    tenant=request.tenant,
                    adapter=request.adapter,
                )
            )
        )
    deadline = time.monotonic() + _PATIENCE_S
    while engine.has_work():
        for update in engine.step():
            answer = answers[update.sequence_id]
            answer.token_ids += update.token_ids
            answer.logprobs += update.logprobs or []
            answer.error = answer.error or (update.error.message if update.error else None)
        if engine.waits:
            time.sleep(0.001)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine got nowhere within {_PATIENCE_S:g} s: {engine.load()}")
    engine.check_integrity()
    return list(answers.values())
