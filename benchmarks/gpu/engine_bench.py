"""A whole engine on random weights: scheduler, runner, sampling, adapters from the host."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from motet.adapters.adapter import NARROW_MODULES
from motet.adapters.format.tensor_file import Tensor
from motet.adapters.packing.layout import AdapterLayout, Dtype
from motet.adapters.packing.packing import PAGE_DTYPES
from motet.adapters.store.store import AdapterStore
from motet.benchmarks.gpu.machine import Machine
from motet.benchmarks.gpu.roofline import DecodeStep, Floor, roofline
from motet.kernels.backend import Kernels
from motet.workers.costs.devices import Device
from motet.workers.engine import Engine
from motet.workers.execution.executor import FeedingExecutor, LocalExecutor
from motet.workers.execution.graphs import CudaRecorder
from motet.workers.execution.runner import Runner
from motet.workers.memory.adapter_loader import AdapterLoader
from motet.workers.memory.host_adapter_cache import HostAdapterCache
from motet.workers.memory.page_arrays import DevicePages, HostPages, PageArray, PinnedArena, make_pool, plan_pool
from motet.workers.memory.page_mover import PageMover
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.rotary import rotary_tables
from motet.workers.models.sharding import ModelSharding
from motet.workers.parallel import Alone
from motet.workers.plan import Tier
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import AdapterRef, GangInfo, SamplingParams, SequenceRequest, SequenceUpdate, Submit

RANK = 16
BLOCK = 16


@dataclass(frozen=True)
class Size:
    """`context`: tokens of each sequence when decodes are timed; of all but the first where that is `longest`."""

    config: dict[str, object]
    num_sequences: int
    context: int
    num_steps: int
    adapters: tuple[int, ...]
    pool_bytes: int
    host_bytes: int  # for adapters, and as much for KV behind the pool
    num_logprobs: int | None = None
    longest: int | None = None
    max_tokens: int = 2048  # of a step

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of each sequence's prompt."""
        return (self.longest or self.context, *(self.context,) * (self.num_sequences - 1))


@dataclass(frozen=True)
class Served:
    steps_s: tuple[float, ...]  # of the steps in which every sequence decodes
    prompts_s: tuple[float, ...]  # of those before, which compute prompts
    token_ids: list[list[int]]  # by sequence
    logprobs: torch.Tensor  # of all tokens, if requested

    @property
    def step_s(self) -> float:
        """The median; NaN: there was no such step."""
        return statistics.median(self.steps_s) if self.steps_s else float("nan")


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY = LLAMA_3_8B | {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FULL_SIZE = Size(LLAMA_3_8B, 64, 1024, 96, (0, 1, 8, 64), 40 << 30, 8 << 30)
CHECK_SIZE = Size(TINY, 9, 40, 24, (0, 3), 8 << 20, 1 << 20, num_logprobs=0)
DRY_SIZE = Size(TINY, 3, 10, 2, (0, 2), 4 << 20, 1 << 20, num_logprobs=0, max_tokens=64)


class RandomWeights:
    """A `WeightSource` that makes each tensor of random numbers, on the device, when it is taken."""

    has_head = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._generator = torch.Generator(machine.device).manual_seed(0)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        *,
        in_floats: bool = False,
    ) -> torch.Tensor:
        assert (rows or (0, shape[0])) == (0, shape[0]) and columns in (None, (0, shape[-1])), "one worker has all"
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._machine.dtype, device=self._machine.device)
        values = torch.randn(shape, dtype=self._machine.dtype, device=self._machine.device, generator=self._generator)
        return values.mul_(shape[1] ** -0.5)

    def take_quantised(self, *_: object, **__: object) -> None: ...

    def __contains__(self, name: str) -> bool:
        return False

    def has_other_head(self) -> bool:
        return False

    def drop(self, *, prefix: str = "", suffix: str = "") -> None: ...

    def split(self, name: str, num_rows: Mapping[str, int]) -> None: ...

    def finish(self) -> None: ...


def ranks_of(layout: AdapterLayout) -> dict[str, int]:
    """Of adapters on all modules whose LoRA is recorded."""
    return {module: RANK for module in layout.shape.modules if module not in NARROW_MODULES}


class RandomStore(AdapterStore):
    """Packed adapters of random numbers seeded by their digests, in place of files."""

    def __init__(self, layout: AdapterLayout) -> None:
        ranks = ranks_of(layout)
        shape = (layout.num_pages(ranks), layout.shape.num_layers, layout.slab)
        values = np.random.default_rng(1).standard_normal(shape, np.float32) * 0.02
        self._pages = values.astype(PAGE_DTYPES[layout.dtype])

    def load_packed(self, digest: str, layout: AdapterLayout) -> Tensor:
        return np.roll(self._pages, int(digest), 0)


class Bench:
    """An engine, and the floor of its decode step. Benches of one size have equal weights and adapters."""

    def __init__(self, machine: Machine, size: Size, kernels: Kernels) -> None:
        model = model_of(size)
        sharding = ModelSharding(model)
        dtype_name: Dtype = "float32" if machine.dtype == torch.float32 else "bfloat16"
        layout = sharding.layout(BLOCK, dtype_name)
        geometry = plan_pool(sharding, BLOCK, machine.dtype, size.pool_bytes)
        pool = make_pool(geometry, machine.device)
        decoder = load_decoder(sharding, RandomWeights(machine), kernels)
        rotary = rotary_tables(model.rotaries, model.rotary_dims, model.max_model_len, machine.device)
        self.runner = Runner(decoder, kernels, Alone(), pool, geometry, layout, rotary, geometry.num_pages)
        on_gpu = machine.device.type == "cuda"
        if on_gpu:
            self.runner.keep_tables(size.num_sequences, model.max_model_len)
            self.runner.warm_up(size.max_tokens, size.num_sequences)
            record = CudaRecorder()
            self.runner.record_decodes(size.max_tokens, record)
            self.runner.record_mixed(size.max_tokens, record)
        num_host_pages, pinned = size.host_bytes // geometry.page_bytes, on_gpu
        arena = PinnedArena(num_host_pages, geometry) if pinned else None
        host = HostAdapterCache(RandomStore(layout), layout, size.host_bytes, arena)
        loader = AdapterLoader(host, pool, kernels, store_deadline_s=60.0)
        tiers: dict[Tier, PageArray] = {
            "device": DevicePages(pool, kernels.read_pages, kernels.write_pages),
            "host": HostPages(num_host_pages, geometry, pinned),
        }
        mover = PageMover(tiers, machine.device)
        make = FeedingExecutor if on_gpu else LocalExecutor
        executor = make(self.runner, loader, mover, kernels.choice, torch.get_num_threads(), machine.device)
        limits = GangLimits(
            model.max_model_len,
            model.vocab_size,
            BLOCK,
            geometry.num_pages,
            size.max_tokens,
            size.num_sequences,
            num_state_pages=geometry.state.num_pages,
        )
        scheduler = Scheduler(
            limits,
            frozenset(),
            lambda ref: layout.num_pages(ref.module_ranks),
            tiers=TierSizes(host=num_host_pages),
        )
        info = GangInfo(
            gang_id="",
            model="random",
            device=machine.device.type,
            dtype=dtype_name,
            kernels=kernels.choice,
            max_model_len=model.max_model_len,
            block_size=BLOCK,
            num_pages=geometry.num_pages,
            page_bytes=geometry.page_bytes,
            num_threads=torch.get_num_threads(),
            vocab_size=model.vocab_size,
        )
        self.engine = Engine(scheduler, executor, info)
        self.model, self._layout, self._next_id = model, layout, 0
        self._size, self._num_rounds = size, 0
        self.weights_in_float8 = kernels.float8 is not None

    def floor(self, num_adapters: int, limits: Device) -> Floor:
        """Of a decode step of all sequences, halfway through `serve`."""
        size, newest = self._size, self._size.num_steps // 2
        element_bytes = 2 if self._layout.dtype == "bfloat16" else 4
        contexts = tuple(context + newest for context in size.contexts)
        step = DecodeStep(contexts, num_adapters, RANK, element_bytes, self.weights_in_float8)
        return roofline(self.model, step, limits)

    def bring_adapters(self, num_adapters: int) -> None:
        """Has them in the pool, so that no sequence of `serve` waits for its adapter while others decode."""
        size, self._size = self._size, replace(self._size, context=2, longest=None, num_steps=1)
        self.serve(num_adapters)
        self._size = size

    def serve(
        self,
        num_adapters: int,
        on_decode: Callable[[int], None] = lambda num_decodes: None,
        on_prompts: Callable[[int], None] = lambda num_steps: None,
    ) -> Served:
        """All sequences at once, each on one of `num_adapters` in turn, or on the base. Always the same prompts.

        `on_decode` is called after each step in which every sequence has decoded, with the number of such steps;
        `on_prompts` likewise after each step before all sequences have a token.
        """
        size, modules = self._size, ranks_of(self._layout)
        generator = torch.Generator().manual_seed(num_adapters)
        received: dict[int, list[SequenceUpdate]] = {}
        self._num_rounds += 1
        tenant = f"round-{self._num_rounds}"  # shares no KV with other rounds, whatever they ask
        for index, context in enumerate(size.contexts):
            ref = AdapterRef(str(index % num_adapters), modules) if num_adapters else None
            prompt = torch.randint(0, self.model.vocab_size, (context,), generator=generator).tolist()
            sampling = SamplingParams(
                max_tokens=size.num_steps + 1, temperature=0.0, ignore_eos=True, num_logprobs=size.num_logprobs
            )
            self._next_id += 1
            received[self._next_id] = []
            self.engine.receive(
                Submit(
                    SequenceRequest(
                        sequence_id=self._next_id,
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        tenant=tenant,
                        adapter=ref,
                    )
                )
            )
        times, prompts = [], []
        while self.engine.has_work():
            started = time.perf_counter()
            updates = self.engine.step()
            took = time.perf_counter() - started
            for update in updates:
                if update.error is not None:
                    raise RuntimeError(update.error.message)
                received[update.sequence_id].append(update)
            if len(updates) == size.num_sequences and all(len(own) > 1 for own in received.values()):
                times.append(took)
                on_decode(len(times))
            elif not all(received.values()):
                prompts.append(took)
                on_prompts(len(prompts))
            if self.engine.waits:
                time.sleep(0.001)
        self.engine.check_integrity()
        token_ids = [[token for update in own for token in update.token_ids] for own in received.values()]
        if {len(tokens) for tokens in token_ids} != {size.num_steps + 1}:
            raise RuntimeError(f"a sequence ended with other than {size.num_steps + 1} tokens")
        logprobs = [one.chosen for own in received.values() for update in own for one in update.logprobs or ()]
        return Served(tuple(times), tuple(prompts), token_ids, torch.tensor(logprobs))


def model_of(size: Size) -> ModelConfig:
    """As it is read from a folder."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(size.config))
        return ModelConfig.from_folder(Path(folder))
