"""torch's operations on a stand-in GPU: computed on the CPU at once, and noted as a GPU would get them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from motet.tests.rigs.stand_in_gpu.call import Call, is_collective, leaves, mapped
from motet.tests.rigs.stand_in_gpu.capture import Captures, Use
from motet.tests.rigs.stand_in_gpu.device_tensor import DeviceTensor
from motet.tests.rigs.stand_in_gpu.pinned_memory import PinnedMemory, poison
from motet.tests.rigs.stand_in_gpu.streams import Streams
from motet.tests.rigs.stand_in_gpu.tally import Copy, Tally, product_line, thread_name
from motet.tests.rigs.stand_in_gpu.timeline import GpuProblem, Timeline, Work
from motet.tests.rigs.stand_in_gpu.watched_memory import Lease, WatchedMemory

CPU = torch.device("cpu")
# Of these the host needs numbers, or the sizes of what comes out.
WAITING = {
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount"),
    *("unique", "_unique", "_unique2", "unique_consecutive", "unique_dim"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
BY_ROWS = {*INDEXING, "index_select", "index_copy_", "index_add_"}
MOVES = {"to", "_to_copy", "copy_"}
NOT_READ = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
EMPTY = ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like")


class MixedDevicesError(GpuProblem):
    """An operation gets tensors of the host beside those of the device."""


class Operations:
    """Carries out what torch dispatches, for the host and for the device."""

    def __init__(
        self, timeline: Timeline, tally: Tally, pinned: PinnedMemory, streams: Streams, captures: Captures
    ) -> None:
        self._timeline, self._tally, self._pinned = timeline, tally, pinned
        self._streams, self._captures = streams, captures
        self.is_closed = False

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` is one of ATen's, `args` as torch gives them."""
        call = Call(func, args, kwargs)
        on_device = any(isinstance(x, DeviceTensor) for x in call.tensors)
        assert not (self.is_closed and on_device), "a tensor of a stand-in GPU outlives it"
        if call.name == "is_pinned":
            return self._pinned.of(call.given["self"]) is not None
        if call.name in ("pin_memory", "_pin_memory"):
            self._captures.refuse("pinned memory is allocated")
            return self._pinned.allocate(call.given["self"])
        if call.name in MOVES:
            moved = self._move(call)
            if moved is not None:
                return moved
        if on_device or _is_gpu(call.given.get("device")):
            return self._on_device(call)
        return self._on_host(call)

    def wrapped(self, inner: torch.Tensor, work: Work | None) -> DeviceTensor:
        """A tensor in memory of its own. `work` has written it; None: it was not written."""
        rows = len(inner) if inner.dim() and len(inner) else 1
        storage, line = inner.untyped_storage(), product_line()
        num_bytes, stream = storage.nbytes(), self._streams.current.number
        memory = WatchedMemory(self._timeline, f"memory of {line}", storage.data_ptr(), num_bytes, num_bytes // rows)
        lease = Lease()
        memory.lease = self._streams.watch_lease(lease, memory, stream)
        # Unwritten memory may have been another tensor's, which its stream still uses: what that stream
        # was given last counts as if it had written it.
        last = work or self._timeline.last_of(stream)
        if last is not None:
            memory.use(slice(None), last, writes=True)
        capture = self._captures.current
        if capture is not None:
            capture.own(memory, inner)
        return DeviceTensor(inner, memory, lease, self.dispatch)

    def wait(self, why: str) -> None:
        """The host waits for all that this thread's stream was given."""
        self._captures.refuse(why)
        if self._streams.warns_of_waits:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        stream = self._streams.current.number
        self._streams.wait_for_host(why, self._timeline.mark(stream), stream)

    def launch(self, operation: str) -> Work:
        self._tally.launches[operation] += 1
        return self._timeline.launch(self._streams.current.number, product_line())

    def _on_host(self, call: Call) -> Any:
        if call.given.get("pin_memory"):
            self._captures.refuse("pinned memory is allocated")
            return self._pinned.allocate(Call(call.func, call.args, call.kwargs | {"pin_memory": False})())
        pinned = [x for x in call.tensors if self._pinned.of(x) is not None]
        if not pinned:
            return call()
        changed = {id(x) for x in call.written}
        self._pinned.use_on_host((), [x for x in pinned if id(x) in changed])
        out = call()
        if not _is_view(out, call.tensors, call.written):
            self._pinned.use_on_host([x for x in pinned if id(x) not in changed], ())
        return out

    def _on_device(self, call: Call) -> Any:
        if call.name in INDEXING:
            call = call.mapped(self._index_moved)
        ours = [x for x in call.tensors if isinstance(x, DeviceTensor)]
        if any(x.dim() and not isinstance(x, DeviceTensor) for x in call.tensors):
            problem = f"{product_line()}: {call.func} gets tensors of the host and of the device"
            raise self._timeline.problem(MixedDevicesError(problem))
        if _needs_host(call):
            self.wait(f"{call.name}: the host needs what the device has computed")
        written = [x for x in call.written if isinstance(x, DeviceTensor)]
        plain, shapes = call.mapped(_plain), [x.inner.shape for x in written]
        carry_out = partial(_exchanged, plain) if is_collective(call.func) else plain

        used = list(_used(call, ours))

        def uses() -> list[Use]:  # anew in each replay: indices may differ
            return [each.now() for each in used]

        self._captures.save(written)
        capture, work = self._captures.current, None
        if capture is None:
            touched, out = uses(), carry_out()
        else:
            out = call.mapped(_plain_at_first_rows(call))() if call.name in BY_ROWS else carry_out()
        assert shapes == [x.inner.shape for x in written], f"{call.func} changes a tensor's shape in place"
        if _is_view(out, plain.tensors, plain.written):
            return self._wrapped_all(out, ours, None)
        if capture is None:
            work = self.launch(call.name)
            for memory, cells, writes in touched:
                memory.use(cells, work, writes=writes)
        elif any(isinstance(x, torch.Tensor) for x in leaves((out,))):
            capture.record(carry_out, out, uses)
        if call.name in EMPTY:
            poison(out)
            work = None
        return self._wrapped_all(out, ours, work)

    def _wrapped_all(self, out: Any, ours: list[DeviceTensor], work: Work | None) -> Any:
        """What came out, on the device: the same tensors where it is they, views of theirs, or new ones."""

        def wrap(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            for each in ours:
                if each.inner is x:
                    return each
            storage = x.untyped_storage()._cdata
            for each in ours:
                if each.inner.untyped_storage()._cdata == storage:
                    return DeviceTensor(x, each.memory, each.lease, self.dispatch)
            return self.wrapped(x, work)

        return mapped(wrap, out)

    def _index_moved(self, x: Any) -> Any:
        """Indices and single numbers of the host go to the device first, as CUDA's own indexing does it."""
        is_here = isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor)
        return self._to_device(x, x.dtype, non_blocking=False) if is_here else x

    def _move(self, call: Call) -> torch.Tensor | None:
        """A copy between host and device; None: this one stays where it is."""
        given = call.given
        non_blocking, target = bool(given.get("non_blocking")), given["self"]
        if call.name == "copy_":
            source = given["src"]
            if isinstance(target, DeviceTensor) and not isinstance(source, DeviceTensor):
                self._into_device(source, target, non_blocking)
            elif isinstance(source, DeviceTensor) and not isinstance(target, DeviceTensor):
                self._to_host(source, target, non_blocking)
            else:
                return None
            return target  # type: ignore[no-any-return]
        source, other = given["self"], given.get("other")
        wanted = other.device if other is not None else given.get("device")
        from_device = isinstance(source, DeviceTensor)
        if wanted is None or _is_gpu(wanted) == from_device:
            return None
        dtype = other.dtype if other is not None else (given.get("dtype") or source.dtype)
        if not from_device:
            return self._to_device(source, dtype, non_blocking)
        made = torch.empty(source.shape, dtype=dtype)
        if non_blocking:
            made = self._pinned.allocate(made)  # as torch does it
        self._to_host(source, made, non_blocking)
        return made

    def _to_device(self, source: torch.Tensor, dtype: torch.dtype, non_blocking: bool) -> DeviceTensor:
        target = self.wrapped(torch.empty_like(source, dtype=dtype), None)
        self._into_device(source, target, non_blocking)
        return target

    def _into_device(self, source: torch.Tensor, target: DeviceTensor, non_blocking: bool) -> None:
        if source.numel() == 0:
            return  # nothing is copied
        region = self._pinned.of(source)
        self._captures.refuse("a copy from the host's memory")
        self._count_copy("to device", source, waits=not non_blocking or region is None)
        work = self.launch("copy to device")
        target.memory.use(target.memory.cells_of(target.inner), work, writes=True)
        if region is not None:
            region.use(region.cells_of(source), work, writes=False)
        target.inner.copy_(source)
        if not non_blocking or region is None:
            self.wait("a copy to the device" + ("" if region is not None else " from pageable memory"))

    def _to_host(self, source: DeviceTensor, target: torch.Tensor, non_blocking: bool) -> None:
        if source.numel() == 0:
            return  # nothing is copied
        region = self._pinned.of(target)
        self._captures.refuse("a copy to the host's memory")
        self._count_copy("to host", target, waits=not non_blocking or region is None)
        work = self.launch("copy to host")
        source.memory.use(source.memory.cells_of(source.inner), work, writes=False)
        if region is not None:
            region.use(region.cells_of(target), work, writes=True)
        target.copy_(source.inner)
        if not non_blocking or region is None:
            self.wait("a copy to the host" + ("" if region is not None or not non_blocking else "'s pageable memory"))

    def _count_copy(self, kind: Any, tensor: torch.Tensor, waits: bool) -> None:
        self._tally.copies.append(Copy(kind, tensor.numel() * tensor.itemsize, waits, product_line(), thread_name()))


def _plain_at_first_rows(call: Call) -> Callable[[Any], Any]:
    """While a graph is captured indices may hold nothing yet, and only shapes count: all of them are zero."""
    indices = {id(x) for x in leaves((call.given.get("indices"), call.given.get("index")))}

    def change(x: Any) -> Any:
        return torch.zeros_like(x.inner) if isinstance(x, DeviceTensor) and id(x) in indices else _plain(x)

    return change


def _exchanged(collective: Call) -> Any:
    """What a collective gives: gloo's own threads compute it beside the host, where NCCL would in the stream."""
    out = collective()
    for each in leaves((out,)):
        if isinstance(each, torch.ScriptObject):
            torch.distributed.Work.unbox(each).wait()
    return out


def _is_gpu(device: Any) -> bool:
    """A GPU without a number comes as `meta`: torch asks the guard for the number, and that is the one of `meta`."""
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _plain(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.inner
    return CPU if isinstance(x, torch.device) else x


def _needs_host(call: Call) -> bool:
    masks = [x for x in call.given.get("indices") or () if x is not None and x.dtype in (torch.bool, torch.uint8)]
    unsized = call.name == "repeat_interleave" and call.given.get("output_size") is None
    return bool(masks) or unsized or call.name in WAITING


def _is_view(out: Any, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
    """Nothing was computed: what came out is memory that went in."""
    made = [x for x in leaves((out,)) if isinstance(x, torch.Tensor)]
    if written or not made:
        return False
    storages = {x.untyped_storage()._cdata for x in tensors}
    return all(x.untyped_storage()._cdata in storages for x in made)


@dataclass(frozen=True)
class _Used:
    """A tensor that an operation reads or writes. It does not keep the memory from being freed."""

    memory: WatchedMemory
    inner: torch.Tensor
    rows: tuple[int, torch.Tensor] | None  # only these of a dimension; None: all
    writes: bool

    def now(self) -> Use:
        memory, rows = self.memory, self.rows
        cells = memory.cells_of(self.inner) if rows is None else memory.cells_of_rows(self.inner, *rows)
        return memory, cells, self.writes


def _used(call: Call, ours: list[DeviceTensor]) -> Iterator[_Used]:
    changed, first, rows = {id(x) for x in call.written}, call.given.get("self"), _rows(call)
    for x in ours:
        if x is not first or not call.name.startswith(NOT_READ):
            yield _Used(x.memory, x.inner, rows if x is first else None, id(x) in changed)


def _rows(call: Call) -> tuple[int, torch.Tensor] | None:
    """The dimension and the rows of it that an operation picks out of its first tensor."""
    if call.name not in BY_ROWS:
        return None
    if "indices" not in call.given:
        return int(call.given["dim"]) % max(call.given["self"].dim(), 1), call.given["index"].inner
    picked = [(dim, index) for dim, index in enumerate(call.given["indices"]) if index is not None]
    if not picked or picked[0][1].dtype in (torch.bool, torch.uint8):
        return None
    return picked[0][0], picked[0][1].inner
