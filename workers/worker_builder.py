"""Builds one worker's part of a gang: its share of the base, its pool, its loader."""

from __future__ import annotations

import torch

from ..adapters.store import AdapterStore
from ..kernels.backend import choose_kernels
from .config import EngineConfig
from .execution.adapter_loader import AdapterLoader
from .execution.executor import LocalExecutor
from .execution.runner import Runner
from .memory.pool import make_pool, plan_pool
from .memory.tiers import HostTier
from .models.config import ModelConfig
from .models.decoder import load_decoder
from .models.rotary import rotary_tables
from .models.sharding import ModelSharding
from .models.weights import Checkpoint, Progress
from .parallel import Parallel


def build_executor(config: EngineConfig, parallel: Parallel, on_progress: Progress | None) -> LocalExecutor:
    """What executes plans in this process. Raises ValueError if the model cannot be served with these settings."""
    torch.set_num_threads(config.num_threads)
    device, dtype = torch.device("cpu"), getattr(torch, config.dtype)
    model = ModelConfig.from_folder(config.model_path)
    sharding = ModelSharding(model, parallel.degree, parallel.rank, config.expert_sharding)
    geometry = plan_pool(sharding, config.block_size, dtype, config.pool_bytes)
    layout = sharding.layout(config.block_size, config.dtype)
    kernels = choose_kernels(device, dtype, config.num_threads, config.cache_path)
    pool = make_pool(geometry, device)
    decoder = load_decoder(sharding, Checkpoint(config.model_path, dtype, device, on_progress), kernels.pack_linear)
    rotary = rotary_tables(model.rotaries, model.head_dim, config.context_of(model.max_model_len), device)
    runner = Runner(decoder, kernels, parallel, pool, geometry, layout, rotary)
    host = HostTier(AdapterStore(config.store_path), layout, config.host_bytes, pinned=False)
    return LocalExecutor(runner, AdapterLoader(host, pool, kernels), kernels.name)
