"""Engines over a store of adapters, driven step by step, their integrity checked after every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from motet.adapters.format.base_weights import BaseWeights
from motet.adapters.format.score_head import ScoreHead
from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout, Dtype
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.part_configs import engine_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.workers.config import EngineConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.execution.executor import LocalExecutor
from motet.workers.memory.page_arrays import pool_of
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding, layouts_of_gang
from motet.workers.models.stored_tensor import base_tensors
from motet.workers.plan import StepPlan, unpacked
from motet.workers.scheduling.measured_costs import MeasuredCosts
from motet.workers.wire.messages import (
    AdapterRef,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    Submit,
    TokenLogprobs,
)


@dataclass
class SequenceOutput:
    """All that an engine has returned for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab] each, only with `tap_logits`
    finish_reason: str | None = None
    error: SequenceError | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True)
class Stock:
    """A model, and a store with PEFT folders as uploads leave them there."""

    model_path: Path
    store_path: Path
    layout: AdapterLayout
    block_size: int
    refs: Mapping[str, AdapterRef]
    heads: Mapping[str, ScoreHead] = field(default_factory=dict)  # of sequence classifiers, in float32

    @staticmethod
    def make(
        model_path: Path, adapters: Mapping[str, Path], store_path: Path, block_size: int = 8, dtype: Dtype = "float32"
    ) -> Stock:
        model, store = ModelConfig.from_folder(model_path), AdapterStore(store_path)
        layout = ModelSharding(model).layout(block_size, dtype)
        refs, base = {}, BaseWeights(base_tensors(model_path, model.shape))
        heads = {}
        for name, folder in adapters.items():
            config = (folder / "adapter_config.json").read_bytes()
            content = validate(config, folder / "adapter_model.safetensors", model.shape, base=base)
            store.put(content, [layout])
            refs[name] = AdapterRef(content.digest, content.module_ranks, content.invocation_token_ids)
            if content.head is not None:
                heads[name] = store.load_head(content.digest)
        return Stock(model_path, store_path, layout, block_size, refs, heads)

    def num_pages(self, num_tokens: int, adapter: str | None) -> int:
        """Pages that a request takes for its prompt and completion of this many tokens, and for its adapter."""
        ranks = {} if adapter is None else self.refs[adapter].module_ranks
        num_kv_pages = -(-(num_tokens - 1) // self.block_size)  # the last token has no KV
        return num_kv_pages + self.num_state_pages + self.layout.num_pages(ranks)

    @property
    def num_state_pages(self) -> int:
        """Pages of a sequence's recurrent state."""
        sharding = ModelSharding(ModelConfig.from_folder(self.model_path))
        return pool_of(sharding, self.block_size, getattr(torch, self.layout.dtype), 1).state.num_pages

    def gang_config(self, num_pages: int, degree: int, **settings: Any) -> EngineConfig:
        """Of a gang whose workers have pools of so many pages; the store gets the adapters as they pack them."""
        model, store = ModelConfig.from_folder(self.model_path), AdapterStore(self.store_path)
        expert_sharding = settings.get("expert_sharding", "tensor")
        layouts = layouts_of_gang(model, degree, self.block_size, self.layout.dtype, expert_sharding)
        for ref in self.refs.values():
            store.put(store.load_content(ref.digest), layouts)
        page_bytes = self.page_bytes * layouts[0].slab // self.layout.slab
        return engine_config(
            model_path=self.model_path,
            store_path=self.store_path,
            dtype=self.layout.dtype,
            block_size=self.block_size,
            tensor_parallel=degree,
            **{"pool_bytes": num_pages * page_bytes, **settings},
        )

    @property
    def page_bytes(self) -> int:
        return self.layout.shape.num_layers * self.layout.slab * (4 if self.layout.dtype == "float32" else 2)

    def engine(self, num_pages: int, **settings: Any) -> EngineRig:
        """An engine whose pool has so many pages. `settings` are fields of EngineConfig."""
        config = engine_config(
            model_path=self.model_path,
            store_path=self.store_path,
            dtype=self.layout.dtype,
            block_size=self.block_size,
            **{"pool_bytes": num_pages * self.page_bytes, **settings},
        )
        return EngineRig(build_engine(config), self.refs)


class EngineRig:
    """Runs an engine's steps, and collects the updates of each sequence. A context manager, which closes the engine."""

    def __init__(self, engine: Engine, refs: Mapping[str, AdapterRef]) -> None:
        self.engine, self.refs = engine, refs
        self.outputs: dict[int, SequenceOutput] = {}

    def __enter__(self) -> EngineRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def submit(
        self,
        sequence_id: int,
        prompt: list[int],
        adapter: AdapterRef | str | None,
        sampling: SamplingParams,
        generated: Sequence[int] = (),
    ) -> None:
        """Submits a request. `generated`: tokens that the sequence had at another gang before."""
        ref = self.refs[adapter] if isinstance(adapter, str) else adapter
        self.outputs[sequence_id] = SequenceOutput()
        self.engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=sequence_id,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    tenant="acme",
                    adapter=ref,
                    generated_token_ids=list(generated),
                )
            )
        )

    def step(self) -> list[SequenceUpdate]:
        updates = self.engine.step()
        self.engine.check_integrity()
        for update in updates:
            output = self.outputs[update.sequence_id]
            assert not output.ended, f"an update for sequence {update.sequence_id} after its end: {update}"
            output.token_ids += update.token_ids
            output.logprobs += update.logprobs or []
            output.finish_reason, output.error = update.finish_reason, update.error
        if self.engine.waits:
            time.sleep(0.0005)
        return updates

    def finish(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Steps until nothing is left to do."""
        deadline = time.monotonic() + PATIENCE_S  # an engine that gets nowhere fails its test, it does not hang it
        while self.engine.has_work():
            self.step()
            after_step()
            assert time.monotonic() < deadline, f"no end in sight: {self.engine.load()}"

    def assert_idle(self) -> None:
        """All pages are free again but those of adapters and prefixes kept for the next request."""
        now = self.engine.load().gauges
        assert (now.num_running, now.num_waiting) == (0, 0)
        assert now.num_free_pages + now.num_adapter_pages + now.num_idle_prefix_pages == now.num_pages

    def prefer_copies(self) -> None:
        """From now on pages are always copied back, though this tiny model would compute them again faster."""
        scheduler = self.engine._scheduler
        scheduler._costs.observe_step = lambda *_: None  # type: ignore[method-assign]
        scheduler._costs.observe_copy = lambda *_: None  # type: ignore[method-assign]
        for _ in range(100):
            MeasuredCosts.observe_step(scheduler._costs, 1, 1000, 1000.0)

    def tap_logits(self) -> None:
        """From now on each step also computes its logits a second time, for `SequenceOutput.logits`."""
        executor = self.engine.executor
        assert isinstance(executor, LocalExecutor)
        begin = executor.begin

        def tapped(plan: StepPlan) -> None:
            if plan.sequences:
                batch = sorted(plan.sequences, key=lambda sequence: sequence.adapter or "")  # the order of its rows
                sampling = [sequence for sequence in batch if sequence.sample is not None]
                states = [each.state for each in batch if each.state is not None]
                pages = [page for state in states for page in unpacked(state.target)]
                before = executor.runner.pool[pages]
                for sequence, row in zip(sampling, executor.runner.logits(plan), strict=True):
                    self.outputs[sequence.sequence_id].logits.append(row)
                executor.runner.pool[pages] = before
            begin(plan)

        executor.begin = tapped  # type: ignore[method-assign]
