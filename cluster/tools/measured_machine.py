"""Costs of a base's steps on this machine: an engine is built, given loads, and timed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ...adapters.store.store import AdapterStore
from ...workers.config import EngineConfig
from ...workers.costs.measured_steps import RecordingExecutor, costs_of, load_each, random_adapters, record_loads
from ...workers.costs.step_costs import StepCosts
from ...workers.engine_builder import build_engine
from ...workers.models.config import ModelConfig
from ...workers.models.sharding import ModelSharding
from ..config import MotetConfig

NUM_ADAPTERS = 16  # that steps are measured with
_ROUNDS = 2


def measure_machine(model_path: Path) -> StepCosts:
    """On CPUs, with motet's defaults, in bfloat16. Raises ValueError for a base that cannot be served."""
    with tempfile.TemporaryDirectory(prefix="motet-costs-") as folder:
        config = engine_config(model_path, Path(folder))
        layout = ModelSharding(ModelConfig.from_folder(model_path)).layout(config.block_size, config.dtype)
        refs = random_adapters(AdapterStore(config.store_path), layout, NUM_ADAPTERS)
        engine = build_engine(config)
        engine.executor = recording = RecordingExecutor(engine.executor)
        try:
            free_id = load_each(engine, recording, refs, 0)
            recording.steps.clear()  # those of a process that has just started are slow
            record_loads(engine, recording, refs, free_id, _ROUNDS)
        finally:
            engine.close()
    return costs_of(recording, engine.info, model_path)


def engine_config(model_path: Path, data_dir: Path) -> EngineConfig:
    """Without a cache of prefixes: no prompts of a trace share one, and kept pages would have to be evicted."""
    return MotetConfig.of(
        model_path=model_path, data_dir=data_dir, device="cpu", dtype="bfloat16", prefix_cache=False
    ).engine
