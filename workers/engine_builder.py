"""Builds a gang's engine from its settings."""

from __future__ import annotations

import torch

from ..adapters.layout import AdapterLayout
from ..adapters.store import AdapterStore
from ..kernels.backend import torch_kernels
from .config import EngineConfig
from .engine import Engine
from .execution.adapter_loader import AdapterLoader
from .execution.executor import LocalExecutor
from .execution.runner import Runner
from .loop import EngineLoop
from .memory.pool import PoolGeometry, make_pool, plan_pool
from .memory.tiers import HostTier
from .messages import GangInfo
from .models.config import ModelConfig
from .models.decoder import load_decoder
from .models.rotary import rotary_table
from .models.weights import Checkpoint, Progress
from .scheduling.admission import Limits
from .scheduling.scheduler import Scheduler


def build_engine_loop(config: EngineConfig, on_progress: Progress | None = None) -> EngineLoop:
    """An engine with a thread of its own, not yet started. Raises ValueError if the model cannot be served."""
    return EngineLoop(build_engine(config, on_progress))


def build_engine(config: EngineConfig, on_progress: Progress | None = None) -> Engine:
    """Loads the base and lays out the pool. Raises ValueError if the model cannot be served with these settings."""
    torch.set_num_threads(config.num_threads)
    device, dtype = torch.device("cpu"), getattr(torch, config.dtype)
    model = ModelConfig.from_folder(config.model_path)
    geometry = plan_pool(model, config.block_size, dtype, config.pool_bytes)
    layout = AdapterLayout(model.shape, geometry.slab, config.dtype)
    max_model_len = min(config.max_model_len or model.max_model_len, model.max_model_len)
    kernels = torch_kernels()
    pool = make_pool(geometry, device)
    decoder = load_decoder(model, Checkpoint(config.model_path, dtype, device, on_progress))
    rotary = rotary_table(model.rotary, model.head_dim, max_model_len).to(device)
    runner = Runner(decoder, kernels, pool, geometry, layout, rotary)
    host = HostTier(AdapterStore(config.store_path), layout, config.host_bytes, pinned=False)
    scheduler = Scheduler(
        Limits(
            max_model_len,
            model.vocab_size,
            config.block_size,
            geometry.num_pages,
            config.max_tokens_per_step,
            config.max_num_sequences,
        ),
        frozenset(model.eos_token_ids),
        lambda ref: layout.num_pages(ref.module_ranks),
    )
    info = _info(config, geometry, kernels.name, max_model_len, model.vocab_size)
    return Engine(scheduler, LocalExecutor(runner, AdapterLoader(host, pool, kernels)), info)


def _info(config: EngineConfig, geometry: PoolGeometry, kernels: str, max_model_len: int, vocab_size: int) -> GangInfo:
    return GangInfo(
        gang_id="",  # the leader's replica names itself
        model=str(config.model_path),
        device="cpu",
        dtype=config.dtype,
        kernels=kernels,
        max_model_len=max_model_len,
        block_size=geometry.block_size,
        num_pages=geometry.num_pages,
        page_bytes=geometry.page_bytes,
        vocab_size=vocab_size,
    )
