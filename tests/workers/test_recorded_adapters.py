"""The adapters' tables that all recordings share: what they take, and whose adapters they hold."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.adapters.packing.layout import AdapterLayout
from motet.kernels.backend import triton_kernels
from motet.kernels.lora import ABSENT, LoraSegment, ModuleSlice, PagedAdapter
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.specialisations import recorded_gpu
from motet.tests.rigs.stand_in_gpu import streams
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers import worker_builder
from motet.workers.execution.graphs import RecordedAdapters, bucket_sizes
from motet.workers.models.config import ModelConfig
from motet.workers.models.step_adapters import AdapterTables, StepAdapters
from motet.workers.worker_builder import DeviceMemory

CPU = torch.device("cpu")
ENTRY_BYTES = 8  # of a page in a table
PARTS = dict[str, int]  # bytes of a worker's memory, by what takes them


@pytest.fixture(scope="module")
def stocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stock]:
    folder = tmp_path_factory.mktemp("recorded")
    changes: dict[str, dict[str, int]] = {"llama": {}, "mixtral": {"intermediate_size": 48, "num_hidden_layers": 1}}
    return {
        family: Stock.make(
            write_model(family, folder / family, **changed), {}, folder / f"{family} store", 16, "bfloat16"
        )
        for family, changed in changes.items()
    }


@contextmanager
def measured() -> Iterator[list[PARTS]]:
    """What each worker's memory is made of: when a trial's pool is there, and when a worker is ready."""
    found: list[PARTS] = []

    def note(method: Any) -> Any:
        def noted(memory: DeviceMemory, *given: Any) -> Any:
            found.append(dict(memory._parts))
            return method(memory, *given)

        return noted

    with (
        mock.patch.object(DeviceMemory, "room_for_pool", note(DeviceMemory.room_for_pool)),
        mock.patch.object(DeviceMemory, "log", note(DeviceMemory.log)),
    ):
        yield found


def graphs_bytes(stock: Stock, num_pages: int, max_num_sequences: int) -> int:
    small: dict[str, Any] = {"max_num_sequences": max_num_sequences, "max_tokens_per_step": 64, "host_bytes": 0}
    with measured() as parts, recorded_gpu(), stock.engine(num_pages, device="cuda", **small):
        return parts[-1]["graphs"]


@pytest.mark.parametrize("max_num_sequences", [1, 4])
def test_a_page_has_one_entry_however_many_graphs_there_are(stocks: dict[str, Stock], max_num_sequences: int) -> None:
    """With a table for each, small pages on a large GPU had more than a gigabyte of them."""
    few, many = (graphs_bytes(stocks["llama"], num_pages, max_num_sequences) for num_pages in (100, 1100))
    assert many - few == 1000 * ENTRY_BYTES


@pytest.mark.parametrize(("family", "num_tables"), [("llama", 1), ("mixtral", 2)])
def test_parts_take_no_memory(stocks: dict[str, Stock], family: str, num_tables: int) -> None:
    """Of experts there is a table as well."""
    taken = []
    for num_pages in (1000, 2000):
        with stand_in_gpu() as gpu:
            tables = tables_of(stocks[family], num_pages, torch.device("cuda", 0))
            shared = RecordedAdapters(tables, 64, 64)
            before = gpu.streams.num_allocated_bytes
            parts = [shared.part(size, size) for size in bucket_sizes(64)]
            assert None not in parts and gpu.streams.num_allocated_bytes == before
            taken.append(before)
            del tables, shared, parts
    assert taken[1] - taken[0] == 1000 * ENTRY_BYTES * num_tables


def test_a_start_leaves_room_for_the_tables_of_all_pages(
    stocks: dict[str, Stock], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial, which has a pool of one page, has tables as large as they can get."""
    caplog.set_level(logging.INFO, "motet.workers.worker_builder")
    monkeypatch.setattr(worker_builder, "LATER_BYTES", 1 << 20)
    monkeypatch.setattr(streams, "TOTAL_BYTES", 200 << 20)
    small: dict[str, Any] = {"max_num_sequences": 2, "max_tokens_per_step": 16}
    small |= {"pool_bytes": None, "host_bytes": 0}
    with measured() as parts, recorded_gpu(), stocks["llama"].engine(0, device="cuda", **small) as rig:
        num_pages = rig.engine.info.num_pages
        free = torch.cuda.mem_get_info()[0]
    trial, ready = parts
    assert num_pages > 1000 and ready["the pool"] == num_pages * stocks["llama"].page_bytes
    assert ready["graphs"] <= trial["graphs"] < ready["graphs"] + 0.1 * ready["the pool"]
    assert free >= worker_builder.LATER_BYTES
    # Of decodes two sizes, of steps with prompts one in four pieces, of three layers; without and with adapters.
    assert re.search(r"graphs \d+\.\d+ GiB \(12 graphs in \d+\.\d s\)", caplog.text)


def tables_of(stock: Stock, num_pages: int = 100, device: torch.device = CPU) -> AdapterTables:
    model = ModelConfig.from_folder(stock.model_path)
    layout = AdapterLayout(model.shape, model.slab(16), "bfloat16")
    return AdapterTables(triton_kernels(device, torch.bfloat16), layout, num_pages, device)


def segments(*pages: int, router: ModuleSlice | None = None) -> tuple[LoraSegment, ...]:
    """A row of an adapter in each of these pages."""
    modules = (ModuleSlice(16, 16, 0, 0),) * 7 + (() if router is None else (router,))
    expert = PagedAdapter((), modules[:3])
    return tuple(
        LoraSegment(row, row + 1, PagedAdapter((page,), modules, (expert,) * 4)) for row, page in enumerate(pages)
    )


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_part_holds_a_step_and_nothing_of_those_before(stocks: dict[str, Stock], family: str) -> None:
    """Parts of different sizes in turn, one of them with the same step as a smaller one before."""
    tables = tables_of(stocks[family])
    shared = RecordedAdapters(tables, 8, 8)
    small, large = shared.part(2, 2), shared.part(8, 8)
    assert small is not None and large is not None
    assert small.lora.pages.data_ptr() == large.lora.pages.data_ptr()
    assert (len(small.lora.tiles), len(large.lora.tiles)) == (2, 8)
    router = ABSENT if family == "mixtral" else None
    five, one, three = (tables.prepare(segments(*pages, router=router)) for pages in ((5, 6, 7, 8, 9), (3,), (1, 2, 4)))
    assert five is not None and one is not None and three is not None
    for part, step, pages in ((large, five, [5, 6, 7, 8, 9]), (small, one, [3]), (large, one, [3])):
        assert shared.hold(part, step)
        live = part.lora.tiles[part.lora.tiles[:, 1] > 0].tolist()
        assert live == [[row, 1, row] for row in range(len(pages))]
        assert part.lora.pages[: len(pages)].tolist() == pages
        if part.experts is not None:
            assert part.experts.row_segments.tolist() == [
                row if row < len(pages) else -1 for row in range(len(part.experts.row_segments))
            ]
            assert part.experts.pages[: len(pages)].tolist() == pages
    assert not shared.hold(small, three), "of three adapters two have room"
    assert shared.hold(small, one), "what did not fit has left nothing that is taken for another step's"
    assert small.lora.pages[0] == 3


def test_a_step_with_lora_of_a_router_is_not_held(stocks: dict[str, Stock]) -> None:
    tables = tables_of(stocks["mixtral"])
    shared = RecordedAdapters(tables, 4, 4)
    part, step = shared.part(4, 4), tables.prepare(segments(1, 2, router=ModuleSlice(4, 4, 0, 0)))
    assert part is not None and step is not None
    assert step.has_narrow and not shared.hold(part, step)


def test_a_step_that_scales_outputs_is_not_held(stocks: dict[str, Stock]) -> None:
    tables = tables_of(stocks["llama"])
    shared = RecordedAdapters(tables, 4, 4)
    plain = segments(1, 2)
    scaled = tuple(replace(each, adapter=replace(each.adapter, outputs=(0,) + (None,) * 6)) for each in plain)
    part, step = shared.part(4, 4), tables.prepare(scaled)
    assert part is not None and step is not None
    assert step.outputs is not None and not shared.hold(part, step)


def test_a_step_that_is_held_already_is_not_copied_again(
    stocks: dict[str, Stock], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, copied, refill = tables_of(stocks["llama"]), list[StepAdapters](), AdapterTables.refill

    def counted(tables: AdapterTables, reserved: StepAdapters, step: StepAdapters) -> bool:
        copied.append(step)
        return refill(tables, reserved, step)

    monkeypatch.setattr(AdapterTables, "refill", counted)
    shared = RecordedAdapters(tables, 4, 4)
    part, step = shared.part(4, 4), tables.prepare(segments(1, 2))
    assert part is not None and step is not None
    assert [shared.hold(part, step) for _ in range(3)] == [True] * 3
    assert len(copied) == 1


def test_bases_whose_adapters_no_recording_holds_have_no_parts() -> None:
    tables = mock.Mock()
    tables.reserve.return_value = None
    assert RecordedAdapters(tables, 4, 4).part(2, 2) is None
