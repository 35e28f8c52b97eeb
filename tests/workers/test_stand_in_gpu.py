"""What the stand-in GPU finds, and that it takes for good what is good; defects that were there, put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from motet.kernels import pages
from motet.kernels.plain.experts import PlainExperts
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.stand_in_gpu.capture import GraphError
from motet.tests.rigs.stand_in_gpu.device_tensor import HostReadError
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins
from motet.tests.rigs.stand_in_gpu.operations import MixedDevicesError
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu, stand_in_gpu
from motet.tests.rigs.stand_in_gpu.timeline import OrderError
from motet.workers.execution.device_rows import DeviceRows, PageTables
from motet.workers.execution.graphs import CudaRecorder, Cut, DecodeGraphs, RecordedAdapters
from motet.workers.memory.host_adapter_cache import HostAdapterCache
from motet.workers.memory.page_arrays import DevicePages, DiskPages, HostPages, PinnedArena, PoolGeometry, make_pool
from motet.workers.memory.page_mover import PageMover, SideStream
from motet.workers.models.step_adapters import StepAdapters
from motet.workers.plan import MoveEnd, PageMove
from motet.workers.wire.messages import SamplingParams

GPU = torch.device("cuda", 0)
GEOMETRY = PoolGeometry(12, num_layers=3, slab=32, block_size=4, num_kv_heads=2, head_dim=2, dtype=torch.float32)


@pytest.fixture
def gpu() -> Iterator[StandInGpu]:
    with stand_in_gpu() as made:
        yield made


def found(gpu: StandInGpu, error: type[Exception], message: str, use: Callable[[], object]) -> None:
    """`use` raises, and the stand-in keeps it, in case it is caught."""
    with pytest.raises(error, match=message):
        use()
    assert len(gpu.problems) == 1 and gpu.problems[0].startswith(error.__name__)
    gpu.problems.clear()


@pytest.mark.parametrize("use", [torch.Tensor.data_ptr, torch.Tensor.numpy, torch.Tensor.untyped_storage])
def test_the_host_cannot_reach_the_devices_memory(gpu: StandInGpu, use: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.zeros(3, device=GPU)
    found(gpu, HostReadError, "the device's memory", lambda: getattr(tensor, use.__name__)())


def test_tensors_of_host_and_device_do_not_mix(gpu: StandInGpu) -> None:
    on_device = torch.zeros(3, device=GPU)
    assert (on_device + torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]  # a single number goes along with the launch
    found(gpu, MixedDevicesError, "host and of the device", lambda: on_device + torch.ones(3))


@pytest.mark.parametrize(
    ("use", "num_waits"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x[1:].mul_(2), 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x[0] == 0), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.to("cpu", non_blocking=True), 0),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[[0, 2]], 1),
        (lambda x: x[torch.tensor([0, 2])], 1),
        (lambda x: torch.tensor([1.0], device=GPU), 1),
        (lambda x: torch.tensor([1.0]).pin_memory().to(GPU, non_blocking=True), 0),
        (lambda x: torch.tensor([1.0]).pin_memory().to(GPU), 1),
        (lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device=GPU)), 1),
        (lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device=GPU), output_size=4), 0),
    ],
)
def test_waits_are_counted(gpu: StandInGpu, use: Callable[[torch.Tensor], object], num_waits: int) -> None:
    tensor = torch.zeros(4, device=GPU)
    use(tensor)
    assert len(gpu.tally.waits) == num_waits, gpu.tally.waits


def test_another_stream_must_wait_for_what_it_reads_and_overwrites(gpu: StandInGpu) -> None:
    tensor, beside = torch.zeros(4, device=GPU), torch.cuda.Stream(GPU)
    with torch.cuda.stream(beside):
        found(gpu, OrderError, "reads memory of .* before it is known", lambda: tensor + 1)
        beside.wait_event(torch.cuda.default_stream().record_event())
        later = tensor + 1
    found(gpu, OrderError, "writes memory of .* has read it", lambda: tensor.add_(1))
    torch.cuda.current_stream().wait_stream(beside)
    tensor.add_(1)
    assert later.tolist() == [1.0] * 4


def test_rows_are_distinguished(gpu: StandInGpu) -> None:
    """Pages of the pool: a step uses some while a copy beside it writes others."""
    pool, beside = torch.zeros(6, 2, 4, device=GPU), SideStream(GPU)
    content = torch.ones(2, 2, 4).pin_memory()
    layer, rows, copied = pool[:, 1], torch.tensor([0, 3], device=GPU), torch.tensor([5], device=GPU)
    with beside.after(beside.mark()):
        pages.copy_runs(pool, [4, 5], content)
        with torch.cuda.stream(torch.cuda.default_stream()):
            layer[rows] = 7.0
            assert layer[rows].shape == (2, 4)
            found(gpu, OrderError, "reads memory of", lambda: layer[copied])
            found(gpu, OrderError, "writes memory of", lambda: layer.index_copy_(0, copied, torch.ones_like(layer[:1])))
    assert pool.sum().item() == 16 + 2 * 4 * 7


def test_pages_are_copied_within_the_pool_without_a_wait(gpu: StandInGpu) -> None:
    pool = torch.arange(5, device=GPU).view(5, 1, 1).expand(5, 2, 3).contiguous()
    pages.copy_runs(pool, [0, 2], pages.read_pages(pool, [4, 3]))
    assert gpu.tally.waits == []
    assert pool[:, 0, 0].tolist() == [4, 1, 3, 3, 4]


def test_pinned_memory_is_not_used_while_the_device_copies(gpu: StandInGpu) -> None:
    pinned = torch.zeros(4).pin_memory()
    copied = pinned.to(GPU, non_blocking=True)
    assert pinned.is_pinned()
    found(gpu, OrderError, "writes pinned memory before", lambda: pinned.fill_(1.0))
    back = copied.to("cpu", non_blocking=True)
    found(gpu, OrderError, "reads pinned memory before", lambda: back + 1)
    torch.cuda.current_stream().synchronize()
    assert (pinned.fill_(1.0) + back).tolist() == [1.0] * 4


def test_memory_is_not_freed_under_another_stream(gpu: StandInGpu) -> None:
    tensor, beside = torch.zeros(4, device=GPU), torch.cuda.Stream(GPU)
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        tensor.add_(1)
    del tensor
    assert len(gpu.problems) == 1 and "is freed while" in gpu.problems.pop()


def test_a_graph_computes_again_from_what_its_inputs_hold(gpu: StandInGpu) -> None:
    inputs, weight = torch.zeros(3, device=GPU), torch.full((3,), 2.0, device=GPU)
    total = torch.zeros(3, device=GPU)

    def compute(cut: Cut) -> torch.Tensor:
        total.add_(inputs)
        return inputs * weight + 1

    record = CudaRecorder()
    earlier, recording, later = record(lambda cut: inputs - 1), record(compute), record(lambda cut: inputs - 2)
    assert total.tolist() == [0.0] * 3, "what is captured is not computed"
    inputs.copy_(torch.tensor([1.0, 2.0, 3.0]))
    first = recording.replay()
    assert first.tolist() == [3.0, 5.0, 7.0]
    inputs.fill_(5.0)
    assert recording.replay() is first and first.tolist() == [11.0] * 3
    assert total.tolist() == [6.0, 7.0, 8.0]
    assert later.replay().tolist() == [3.0] * 3
    assert first.tolist() == [11.0] * 3, "what is in use is not given to a graph that is captured later"
    assert earlier.replay().tolist() == [4.0] * 3
    assert first.isnan().all().item(), "graphs that share their memory overwrite one another's results"


def test_a_recording_that_is_cut_goes_on_from_what_it_has_computed(gpu: StandInGpu) -> None:
    """What is called between two graphs is called in each replay; what is free by then may be overwritten."""
    inputs, between = torch.zeros(3, device=GPU), torch.zeros(3, device=GPU)
    dropped: list[torch.Tensor] = []

    def compute(cut: Cut) -> torch.Tensor:
        kept, lost = inputs * 2, inputs * 3
        dropped[:] = [lost[:]]
        del lost
        cut(lambda: between.copy_(inputs + 1))
        seen = kept + between
        lost = dropped.pop() + 0
        del kept
        cut(lambda: between.copy_(lost))
        return seen + between

    record = CudaRecorder()
    recording, other = record(compute), record(lambda cut: inputs - 1)
    inputs.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert recording.replay().tolist() == [7.0, 13.0, 19.0]
    assert other.replay().tolist() == [0.0, 1.0, 2.0]
    inputs.fill_(1.0)
    assert recording.replay().tolist() == [7.0] * 3
    assert gpu.tally.replays == 7


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda x: x.sum().item(), "the host needs"),
        (lambda x: x + torch.tensor([1.0], device=GPU), "from the host's memory"),
        (lambda x: x + torch.ones(1).pin_memory().to(GPU, non_blocking=True), "pinned memory is allocated"),
        (lambda x: torch.cuda.synchronize(), "synchronize"),
        (lambda x: x[x > 0], "the host needs"),
    ],
)
def test_what_a_graph_cannot_hold(gpu: StandInGpu, use: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    tensor = torch.zeros(3, device=GPU)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            use(tensor)

    found(gpu, GraphError, message, capture)


def test_a_graph_does_not_outlive_what_it_reads(gpu: StandInGpu) -> None:
    inputs = [torch.zeros(3, device=GPU)]
    recording = CudaRecorder()(lambda cut: inputs[0] + 1)
    inputs.clear()
    found(gpu, GraphError, "which was freed", recording.replay)


class NoAdapters:
    """Those of a base whose adapters no graph can hold."""

    def reserve(self, num_rows: int, num_segments: int) -> None:
        return None

    def part(self, reserved: StepAdapters, num_rows: int, num_segments: int) -> StepAdapters:
        raise AssertionError("there is no room that could be parted")

    def refill(self, reserved: StepAdapters, step: StepAdapters) -> bool:
        raise AssertionError("there is no room that could be filled")


def test_all_graphs_write_their_logits_into_one_buffer(gpu: StandInGpu) -> None:
    """At 256 rows of Llama 3's vocabulary one is 131 MB, and there are more than thirty graphs."""
    table = torch.randn(9, 7, device=GPU)
    graphs = DecodeGraphs(
        lambda token_ids, attention, lora, states: table[token_ids],
        RecordedAdapters(NoAdapters(), 6, 6),
        rows=DeviceRows(PageTables(6, 2, GPU), 8),
        max_rows=6,
        vocab_size=7,
        device=GPU,
        record=CudaRecorder(),
    )
    outputs = [bucket.recording.replay() for bucket in graphs._buckets.values() if bucket is not None]
    assert [len(output) for output in outputs] == [6, 4, 2, 1]
    assert len({id(output.memory) for output in outputs}) == 1  # type: ignore[attr-defined]


def test_the_waits_of_experts_are_found(gpu: StandInGpu) -> None:
    """The twin brings the rows of an expert together by numbers that the host needs."""
    experts, rows = PlainExperts(), torch.randn(4, 6, device=GPU)
    chosen = torch.zeros(4, 2, dtype=torch.int64, device=GPU)
    groups = experts.group(chosen, torch.ones(4, 2, device=GPU), 0, 3)
    experts.linear(rows.index_select(0, groups.rows), torch.randn(3, 5, 6, device=GPU), groups)
    assert len(gpu.tally.waits) >= 3
    assert all(wait.line.startswith("kernels/plain/experts.py:") for wait in gpu.tally.waits)


def movers(folder: Path) -> tuple[PageMover, torch.Tensor]:
    pool = make_pool(GEOMETRY, GPU)
    arrays = {
        "device": DevicePages(pool, pages.read_pages, pages.copy_runs),
        "host": HostPages(12, GEOMETRY, pinned=True),
        "disk": DiskPages(folder, GEOMETRY, pinned=True),
    }
    return PageMover(arrays, GPU), pool  # type: ignore[arg-type]


def carry_out(mover: PageMover, move: PageMove) -> MoveEnd:
    mover.begin(move)
    while not (ended := mover.take_ended()):
        pass
    return ended[0]


ROUND = (
    PageMove(1, "device", (1, 2, 7), "host", (7, 3, 4)),
    PageMove(2, "host", (7, 3, 4), "disk", (0, 8, 5)),
    PageMove(3, "disk", (8, 0, 5), "device", (5, 9, 6)),
    PageMove(4, "host", (7, 3), "device", (10, 11)),
    PageMove(5, "device", (5, 9), "disk", (1, 2)),
    PageMove(6, "disk", (1, 2), "host", (0, 1)),
)


def test_pages_go_round_all_tiers(gpu: StandInGpu, tmp_path: Path) -> None:
    mover, pool = movers(tmp_path)
    content = torch.randn(12, 3, 32)
    pool.copy_(content)
    assert [carry_out(mover, move).problem for move in ROUND] == [None] * len(ROUND)
    mover.close()
    now = pool.cpu()
    assert torch.equal(now[[5, 9, 6, 10, 11]], content[[2, 1, 7, 1, 2]])
    assert not [copy for copy in gpu.tally.copies_of("page-mover") if copy.waits]


def test_a_page_that_the_host_reads_by_its_address_is_found(
    gpu: StandInGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pages were written to host memory once: whatever the device of the content, by `memmove`."""
    mover, _ = movers(tmp_path)
    host = mover._arrays["host"]
    monkeypatch.setattr(host, "write", lambda at, content: pages.write_pages(host._pages, at, content))  # type: ignore[attr-defined]
    assert "the address of the device's memory" in str(carry_out(mover, ROUND[0]).problem)
    mover.close()
    assert gpu.problems[0].startswith("HostReadError: kernels/pages.py:")
    gpu.problems.clear()


def test_pages_of_a_disk_that_overtake_one_another_are_found(
    gpu: StandInGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinned memory that pages come through is filled again before the device has copied them."""
    mover, _ = movers(tmp_path)
    for move in ROUND[:2]:
        carry_out(mover, move)
    monkeypatch.setattr(SideStream, "finish", lambda beside: None)
    assert "writes registered memory before" in str(carry_out(mover, ROUND[2]).problem)
    mover.close()
    gpu.problems.clear()


def test_a_copy_that_does_not_wait_for_the_steps_before_it_is_found(
    gpu: StandInGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, pool = movers(tmp_path)
    pool[1].add_(1)  # a step that writes the page
    monkeypatch.setattr(torch.cuda.Stream(GPU).__class__, "wait_event", lambda stream, event: None)
    assert "reads memory of" in str(carry_out(mover, ROUND[0]).problem)
    mover.close()
    gpu.problems.clear()


def test_pinned_runs_come_back_when_they_are_held_no_more(gpu: StandInGpu) -> None:
    arena = PinnedArena(10, GEOMETRY)
    generator, held = random.Random(2), list[torch.Tensor]()
    for _ in range(300):
        taken = arena.take(generator.randint(1, 4))
        arena.check_integrity()
        if taken is not None:
            assert taken.is_pinned() and not taken.any(), "a run that is handed out twice"
            held.append(taken.fill_(1.0))
        if taken is None or generator.random() < 0.3:
            held.pop(generator.randrange(len(held))).zero_()
        taken = None
        assert arena.num_free == 10 - sum(len(each) for each in held)
    held.clear()
    assert arena.num_free == 10
    assert len(gpu.pinned._regions) == 1
    del arena
    assert gpu.pinned._regions == [], "the driver still holds the memory"


def test_a_driver_that_pins_no_more_is_named(gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    with pytest.raises(ValueError, match=r"4608 bytes of host memory could not be pinned .*host_bytes and kv_host"):
        PinnedArena(12, GEOMETRY)


def test_an_engine_on_a_gpu_needs_no_pinned_memory_of_torchs_after_its_start(tmp_path: Path) -> None:
    """But for the inputs of a step, whose memory torch keeps."""
    model = write_model("llama", tmp_path / "model")
    stock = Stock.make(model, {}, tmp_path / "store")
    with gpu_of_twins() as gpu, stock.engine(40, device="cuda", kv_host_bytes=20 * stock.page_bytes) as rig:
        rig.submit(0, list(range(20)), None, SamplingParams(max_tokens=3, temperature=0.0))
        rig.finish()
        assert {line.partition(":")[0] for line in gpu.tally.pinned} == {"kernels/staging.py"}


class TwoPages:
    """Stands in for the store: adapters of two pages, full of their own number."""

    def load_packed(self, digest: str, layout: object) -> np.ndarray:
        return np.full((2, 3, 32), int(digest), np.float32)


def test_adapters_are_kept_in_the_arena_and_stay_there_while_they_are_copied(gpu: StandInGpu) -> None:
    arena = PinnedArena(6, GEOMETRY)
    cache = HostAdapterCache(TwoPages(), None, 6 * GEOMETRY.page_bytes, arena)  # type: ignore[arg-type]
    held = cache.get("1")
    for digest in ("2", "3", "4", "5"):
        assert cache.get(digest).is_pinned()
        cache.check_integrity()
    assert (held == 1).all() and held.is_pinned() and cache.find("1") is None
    assert [cache.find(digest) is not None for digest in "345"] == [False, True, True], "what is copied takes its room"
    others = [cache.get(digest) for digest in ("6", "7")]
    passing = cache.get("8")
    assert (passing == 8).all() and not passing.is_pinned() and cache.find("8") is None
    del held, others
    assert cache.get("8").is_pinned()
    arena.check_integrity()
