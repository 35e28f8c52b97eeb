"""A trace on motet's engine in virtual time: on gangs of a plan, or as this machine was measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...workers.config import EngineConfig
from ...workers.costs.device_costs import DeviceCosts
from ...workers.costs.replay import PlanCosts, Replayed, TracedRequest, VirtualExecutor, replay
from ...workers.costs.step_costs import StepCosts
from ...workers.costs.step_defaults import cpu_pool_bytes
from ...workers.engine_builder import build_virtual_engine
from ...workers.machine_memory import usable_memory_bytes
from ...workers.models.config import ModelConfig
from ...workers.models.sharding import ModelSharding
from ...workers.wire.messages import AdapterRef
from ..config import MotetConfig
from .gang_capacity import BLOCK_SIZE
from .serving_planner import ServingPlan


def replay_on_machine(
    model_path: Path, costs: StepCosts, requests: Sequence[TracedRequest], ranks: Sequence[int], num_gangs: int = 1
) -> Replayed:
    """With measured times and motet's defaults. Raises ValueError for costs of another base."""
    if costs.model != model_path.name:
        raise ValueError(f"the costs are of {costs.model}, not of {model_path.name}")
    config = _engine_config(
        model_path,
        dtype=costs.dtype,
        pool_bytes=cpu_pool_bytes(usable_memory_bytes(), 1),
        num_threads=costs.num_threads,
    )
    refs = adapter_refs(ModelConfig.from_folder(model_path), requests, ranks)
    return _dealt(config, costs, requests, refs, num_gangs, costs.device)


def replay_on_gangs(model_path: Path, plan: ServingPlan, requests: Sequence[TracedRequest]) -> Replayed:
    """With the times of data sheets over the plan's efficiency."""
    gang = plan.gang
    config = _engine_config(
        model_path,
        dtype="bfloat16",
        pool_bytes=plan.pool_bytes,
        tensor_parallel=plan.degree,
        max_num_sequences=plan.max_num_sequences,
        max_tokens_per_step=plan.settings["max-tokens-per-step"],
        token_interval_s=gang.objectives.token_interval_s,
    )
    page_bytes = ModelSharding(gang.model, plan.degree).layout(BLOCK_SIZE, "bfloat16").page_bytes
    costs = DeviceCosts(gang.model, gang.device, plan.degree, gang.efficiency, gang.host_bytes_per_s, page_bytes)
    refs = adapter_refs(gang.model, requests, gang.traffic.adapters.ranks)
    return _dealt(config, costs, requests, refs, plan.num_gangs, "cuda")


def adapter_refs(model: ModelConfig, requests: Sequence[TracedRequest], ranks: Sequence[int]) -> dict[str, AdapterRef]:
    """Adapters of a trace, on all modules, with these ranks in turn."""
    names = dict.fromkeys(request.adapter for request in requests if request.adapter is not None)
    return {
        name: AdapterRef(name, dict.fromkeys(model.shape.modules, rank))
        for name, rank in zip(names, itertools.cycle(ranks), strict=False)
    }


def _engine_config(model_path: Path, **settings: Any) -> EngineConfig:
    return MotetConfig.of(model_path=model_path, block_size=BLOCK_SIZE, **settings).engine


def _dealt(
    config: EngineConfig,
    costs: PlanCosts,
    requests: Sequence[TracedRequest],
    refs: Mapping[str, AdapterRef],
    num_gangs: int,
    device: str,
) -> Replayed:
    """Gangs get the requests in turn; each has all adapters."""
    total = Replayed()
    for number in range(min(num_gangs, len(requests))):
        executor = VirtualExecutor(costs)
        engine = build_virtual_engine(config, executor, executor.clock, device)
        total.add(replay(engine, requests[number::num_gangs], refs, executor.clock, executor.wait))
    return total
