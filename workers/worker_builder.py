"""Builds one worker of a gang: its part of the base, its pool, its tiers, its loader."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from ..adapters.store.store import AdapterStore
from ..kernels.backend import Kernels, choose_kernels, with_float8_kv, with_float8_weights, with_quantised_weights
from ..kernels.huge_pages import huge_page_bytes
from ..kernels.step import Heads
from .config import EIGHT_BITS_EXPERTS, EngineConfig, default_kv_host_bytes
from .config import LATER_BYTES as LATER_BYTES
from .costs.step_costs import LEAST_ROWS, first_rows_of
from .costs.step_defaults import cpu_pool_bytes
from .device import check_dtype, check_kv_dtype, check_weights_dtype, resolve_device
from .execution.device_rows import MOST_ROWS
from .execution.executor import FeedingExecutor, LocalExecutor
from .execution.graphs import CudaRecorder
from .execution.runner import Runner
from .machine_memory import usable_memory_bytes
from .memory.adapter_loader import AdapterLoader
from .memory.host_adapter_cache import HostAdapterCache
from .memory.page_arrays import (
    DevicePages,
    DiskPages,
    HostPages,
    PageArray,
    PinnedArena,
    PoolGeometry,
    make_pool,
    plan_pool,
    pool_of,
)
from .memory.page_mover import PageMover
from .models.config import ModelConfig
from .models.decoder import load_decoder
from .models.device_checkpoint import DeviceCheckpoint
from .models.quantised_weights import QuantisedCheckpoint
from .models.rotary import rotary_tables
from .models.sharding import ModelSharding
from .models.weights import Checkpoint, Progress
from .parallel import Parallel
from .plan import Tier
from .scheduling.tier_traffic import TierSizes
from .step_measurements import MEASURED_S, SpeedMeter, by_kind, choose_threads, measure_threads, measured_steps, note_of
from .window_pages import kept_window, most_pages

# GPU memory of each part of a worker, measured as the parts are built.

_log = logging.getLogger(__name__)
_GIB = 1 << 30


class DeviceMemory:
    """Measures nothing on a CPU, where the system allocates memory when it is touched."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._parts: dict[str, int] = {}  # bytes by part
        self._notes: dict[str, str] = {}  # by part, for logs and errors
        self._most_allocated_bytes = 0
        self._transient_bytes = 0  # the most that a recurring part takes while it runs

    @property
    def total_bytes(self) -> int:
        """Memory of the GPU."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    @contextmanager
    def part(self, name: str, *, recurs: bool = False) -> Iterator[None]:
        """Counts memory that is allocated in this context and kept. Raises ValueError if it does not fit.

        `recurs`: requests run it again, in addition to all other parts.
        """
        if not self._on_gpu:
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        except torch.OutOfMemoryError as problem:
            raise ValueError(
                f"the GPU has no room for {name}: {self._summary()}, and {self._gib(self.total_bytes)} in all; "
                "a smaller pool_bytes or, where that is unset, a smaller device_memory_share leaves more"
            ) from problem
        part_bytes = torch.cuda.memory_allocated(self._device) - before
        self._parts[name] = part_bytes
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self._most_allocated_bytes = max(self._most_allocated_bytes, peak_bytes)
        transient = peak_bytes - before - part_bytes
        if recurs:
            self._transient_bytes = max(self._transient_bytes, transient)
        if transient > part_bytes:
            self._parts[f"{name}, while it ran"] = transient

    def note(self, name: str, note: str) -> None:
        """Adds a note to a part, for logs and errors."""
        self._notes[name] = note

    def room_for_pool(self, share: float, trial_bytes: int) -> int:
        """Bytes for a pool, so that the whole GPU is filled up to `share`. 0 or less: none are left.

        Call it when all parts are there and have run their largest step, with a pool of `trial_bytes`. Memory of the
        driver's context, of NCCL and of other processes counts as taken.
        """
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # Reserved memory includes that of graphs, which nothing else can use; transient memory is added to it.
        reserved = torch.cuda.memory_reserved(self._device)
        peak_bytes = max(reserved + self._transient_bytes, self._most_allocated_bytes)
        used_bytes = total - free - reserved + peak_bytes - trial_bytes
        room = int(share * total) - used_bytes - LATER_BYTES
        if room > 0:
            _log.info(
                "the GPU's memory: %s of %s may be used, %s are used, %s are reserved for later: the pool gets %s",
                *map(self._gib, (int(share * total), total, used_bytes, LATER_BYTES, room)),
            )
        return room

    def refuse_pool(self, share: float) -> ValueError:
        """The error to raise if no page fits."""
        return ValueError(
            f"the GPU has no room for a pool: device_memory_share = {share:g} of {self._gib(self.total_bytes)} are "
            f"{self._gib(int(share * self.total_bytes))}, and in use are: {self._summary()}, and "
            f"{self._gib(LATER_BYTES)} reserved for later; a larger share, a smaller max_tokens_per_step or "
            "max_num_sequences, or more workers (tensor_parallel) leave more"
        )

    def release(self) -> None:
        """Frees unused memory."""
        gc.collect()
        torch.cuda.empty_cache()

    def log(self) -> None:
        """Logs how the memory is divided."""
        if self._on_gpu:
            free = torch.cuda.mem_get_info(self._device)[0]
            _log.info(
                "the GPU's memory: %s; %s of %s free", self._summary(), self._gib(free), self._gib(self.total_bytes)
            )

    def _summary(self) -> str:
        parts = [
            f"{name} {self._gib(num_bytes)}" + (f" ({self._notes[name]})" if name in self._notes else "")
            for name, num_bytes in self._parts.items()
        ]
        return ", ".join(parts) or "nothing yet"

    @staticmethod
    def _gib(num_bytes: int) -> str:
        return f"{num_bytes / _GIB:.2f} GiB"


_LEAST_IN_HUGE_PAGES = 64 << 20  # bytes; of less it matters little


def build_executor(
    config: EngineConfig,
    parallel: Parallel,
    on_progress: Progress | None,
    thread: ThreadPoolExecutor | None = None,
) -> LocalExecutor:
    """An executor of plans in this process, in `thread` (see `LocalExecutor`).

    Raises ValueError if the model cannot be served with these settings.
    """
    on_progress = on_progress or _ignore
    device, dtype = resolve_device(config.device), getattr(torch, config.dtype)
    check_dtype(device, dtype)
    check_weights_dtype(device, config.weights_dtype)
    check_kv_dtype(device, config.kv_dtype)
    model = ModelConfig.from_folder(config.model_path)
    if config.weights_dtype != "dtype" and model.experts is not None:
        raise ValueError(f"weights_dtype = {config.weights_dtype!r}: {EIGHT_BITS_EXPERTS}")
    sharding = ModelSharding(model, parallel.degree, parallel.rank, config.expert_sharding)
    context = config.context_of(model.max_model_len)
    layout = sharding.layout(config.block_size, config.dtype, config.kv_dtype)
    on_compile = partial(on_progress, "compiling kernels")

    def kernels_of(num_threads: int) -> Kernels:
        chosen = choose_kernels(
            device, dtype, num_threads, config.cache_path, on_compile, allow_plain=config.slow_kernels == "allow"
        )
        if config.weights_dtype == "float8":
            chosen = with_float8_weights(chosen)
        rounds = config.weights_dtype == "int8"
        if rounds or (device.type == "cpu" and model.quantisation is not None):
            chosen = with_quantised_weights(chosen, dtype, num_threads, rounds=rounds)
        return with_float8_kv(chosen) if config.kv_dtype == "float8" else chosen

    kernels = kernels_of(config.num_threads)
    num_heads, sizes = sharding.heads[1] - sharding.heads[0], model.layer_sizes
    heads = Heads(num_heads, sharding.num_kv_heads_of(0), max(sizes.head_dims))
    is_native, num_threads = kernels.is_native(heads), config.num_threads
    # Torch's own threads would wait in a loop for the next operation, on the cores of those that native kernels share.
    torch.set_num_threads(1 if is_native else num_threads)
    memory = DeviceMemory(device)
    with memory.part("weights"):
        if model.quantisation is not None:
            exception = "" if kernels.quantised is None else " where no kernel multiplies their bits"
            _log.info(
                "the base's files are quantised, %s: their weights become %s as they are read%s",
                *(model.quantisation.summary, config.dtype, exception),
            )
            quantised = QuantisedCheckpoint(config.model_path, dtype, device, model.quantisation, on_progress)
            decoder = load_decoder(sharding, quantised, kernels)
        elif device.type == "cuda":
            with DeviceCheckpoint(config.model_path, dtype, device, on_progress) as checkpoint:
                decoder = load_decoder(sharding, checkpoint, kernels)
        else:
            decoder = load_decoder(sharding, Checkpoint(config.model_path, dtype, device, on_progress), kernels)
        rotary = rotary_tables(model.rotaries, model.rotary_dims, context, device)

    def ready_runner(geometry: PoolGeometry, most_pages: int) -> Runner:
        """A runner with a pool. On a GPU it computes once whatever a request may need, and measures that.

        `most_pages`: capacity of the tables of recorded steps.
        """
        with memory.part("the pool"):
            pool = make_pool(geometry, device)
        runner = Runner(decoder, kernels, parallel, pool, geometry, layout, rotary, most_pages)
        if device.type == "cuda":
            with memory.part("chunks of prompts", recurs=True):
                runner.keep_tables(config.max_num_sequences, context)
                runner.warm_up(config.max_tokens_per_step, config.max_num_sequences)
            with memory.part("graphs"):
                record = CudaRecorder()
                runner.record_decodes(config.max_tokens_per_step, record)
                runner.record_mixed(config.max_tokens_per_step, record)
            memory.note("graphs", record.summary())
            pool[0].zero_()  # clears what was written there: attention may multiply what it does not see
        return runner

    parallel.meet()  # the deadline of a step applies from here on, and workers do not load equally fast
    if device.type == "cuda":
        on_progress("recording the GPU's work", 0, 1)
    pool_bytes = config.pool_bytes
    if pool_bytes is None and device.type == "cpu":
        pool_bytes = _least_of_all(cpu_pool_bytes(usable_memory_bytes(), config.pool_sharers), parallel)
    if pool_bytes is None:
        one_page = pool_of(sharding, config.block_size, dtype, 1, config.kv_dtype)
        geometry = replace(one_page, num_pages=_num_pages_left(ready_runner, one_page, memory, config, parallel))
        window = kept_window(geometry.window, device.type)
        if geometry.num_pages < most_pages(
            context, config.block_size, window, config.max_tokens_per_step, geometry.full_layers
        ):
            _log.warning(
                "what the GPU has left holds %d tokens and the context has %d: longer requests are refused; does "
                "another process use this GPU?",
                *(geometry.num_pages * config.block_size, context),
            )
    else:
        geometry = plan_pool(sharding, config.block_size, dtype, pool_bytes, config.kv_dtype)
    runner = ready_runner(geometry, geometry.num_pages)
    if config.measures_threads and num_threads > 1 and is_native and parallel.degree == 1:
        pool = runner.pool

        def runner_of(num_threads: int) -> Runner:
            thread_kernels = kernels_of(num_threads)
            return Runner(decoder, thread_kernels, parallel, pool, geometry, layout, rotary, geometry.num_pages)

        num_threads = _fastest_threads(runner_of, config, min(config.block_size, context), on_progress)
        runner = runner_of(num_threads)
    if device.type == "cuda":
        memory.log()
        on_progress("recording the GPU's work", 1, 1)
    elif is_native:
        _log_huge_pages()
    note, most_rows = runner.step_note, config.max_tokens_per_step
    # What a GPU has recorded stays whole.
    least_rows = max(MOST_ROWS, config.max_num_sequences) + 1 if device.type == "cuda" else LEAST_ROWS
    if config.nano_batches == "auto" and model.recurrent is None and parallel.degree > 1 and most_rows >= least_rows:
        times = measured_steps(parallel, runner, context, least_rows, most_rows)
        runner.nano_batches = first_rows_of(times, least_rows, most_rows)
        note += note_of(times, runner.nano_batches)
    cache = HostAdapterCache(
        AdapterStore(config.store_path), layout, config.host_bytes, _arena(config.host_bytes, geometry, device)
    )
    mover = PageMover(_page_arrays(config, geometry, runner.pool, kernels), device)
    loader = AdapterLoader(cache, runner.pool, kernels, config.store_deadline_s)
    # Tokens are fed where one worker computes everything.
    make = FeedingExecutor if device.type == "cuda" and parallel.degree == 1 else LocalExecutor
    return make(runner, loader, mover, f"{kernels.choice}{note}", num_threads, device, thread)


def _fastest_threads(
    runner_of: Callable[[int], Runner], config: EngineConfig, chunk_tokens: int, on_progress: Progress
) -> int:
    """How many threads to compute with; the log says what each number of them gives."""
    meter = SpeedMeter(runner_of, config.max_num_sequences, config.max_tokens_per_step, chunk_tokens)
    speeds = measure_threads(config.num_threads, meter.measure, on_progress)
    if not speeds:
        _log.info("threads: %d, not measured: a step takes longer than %g s", config.num_threads, MEASURED_S)
        return config.num_threads
    chosen = choose_threads(speeds)
    measured = "; ".join(
        f"{kind} " + ", ".join(f"{speed:.0f} with {count}" for count, speed in of.items())
        for kind, of in by_kind(speeds).items()
    )
    _log.info("threads: %d, because the base makes in tokens/s: %s", chosen, measured)
    return chosen


def _log_huge_pages() -> None:
    """How much of the weights and of what the pool holds so far lies in huge pages, in which it is read faster."""
    sizes = huge_page_bytes()
    if sizes is None or sizes[0] < _LEAST_IN_HUGE_PAGES:
        return
    total, huge = sizes
    level = logging.INFO if 2 * huge >= total else logging.WARNING
    _log.log(
        level,
        "%.0f %% of the %d MiB of weights and pool in memory lie in huge pages%s",
        *(100 * huge / total, total >> 20),
        "" if level == logging.INFO else ": steps are slower; is transparent_hugepage/enabled never, or memory short?",
    )


def _least_of_all(num_bytes: int, parallel: Parallel) -> int:
    """Of the workers of a gang, whose machines may differ."""
    return int(parallel.all_gather(torch.tensor([num_bytes])).min())


def _num_pages_left(
    ready_runner: Callable[[PoolGeometry, int], Runner],
    one_page: PoolGeometry,
    memory: DeviceMemory,
    config: EngineConfig,
    parallel: Parallel,
) -> int:
    """Pages that fit on the worker of the gang with the least room.

    All parts are built once with a pool of one page, measured, and built again with the real pool, since graphs hold
    its address. Tables of pages are measured as if the pool had all of the GPU. Raises ValueError if nothing is left.
    """
    runner = ready_runner(one_page, memory.total_bytes // one_page.page_bytes)
    room = memory.room_for_pool(config.device_memory_share, one_page.page_bytes)
    mine = torch.tensor([max(room, 0) // one_page.page_bytes], device=runner.pool.device)
    num_pages = int(parallel.all_gather(mine).min())
    if num_pages < 1:
        raise memory.refuse_pool(config.device_memory_share)
    del runner
    memory.release()
    return num_pages


def _ignore(stage: str, done: int, total: int) -> None:
    """The default of `on_progress`."""


def tier_sizes(config: EngineConfig, geometry: PoolGeometry) -> TierSizes:
    """How many pages fit into the tiers behind the pool of a worker on this machine.

    All workers of a gang have pages of one size. Where the config leaves host memory open, machines may differ.
    """
    if not config.prefix_cache:
        return TierSizes()
    host_bytes = config.kv_host_bytes
    if host_bytes is None:
        pool_bytes = geometry.num_pages * geometry.page_bytes
        host_bytes = default_kv_host_bytes(pool_bytes, usable_memory_bytes(), config.tensor_parallel)
    return TierSizes(host_bytes // geometry.page_bytes, config.kv_disk_bytes // geometry.page_bytes)


def _arena(host_bytes: int, geometry: PoolGeometry, device: torch.device) -> PinnedArena | None:
    """Pinned memory for adapters; None on a CPU, which needs none, or if nothing is to be kept."""
    num_pages = host_bytes // geometry.page_bytes
    return PinnedArena(num_pages, geometry) if device.type == "cuda" and num_pages else None


def _page_arrays(
    config: EngineConfig, geometry: PoolGeometry, pool: torch.Tensor, kernels: Kernels
) -> dict[Tier, PageArray]:
    sizes, on_gpu = tier_sizes(config, geometry), pool.device.type == "cuda"
    arrays: dict[Tier, PageArray] = {"device": DevicePages(pool, kernels.read_pages, kernels.write_pages)}
    if sizes.host:
        arrays["host"] = HostPages(sizes.host, geometry, pinned=on_gpu)
    if sizes.disk:
        arrays["disk"] = DiskPages(config.kv_disk_path, geometry, pinned=on_gpu)
    return arrays
