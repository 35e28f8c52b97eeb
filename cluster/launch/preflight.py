"""Checks of the settings of `motet serve` before anything is started."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from ...adapters.packing.packing import PAGE_DTYPES
from ...workers.config import EIGHT_BITS_EXPERTS, FLOAT8_MULTIPLE
from ...workers.costs.step_defaults import cpu_pool_bytes
from ...workers.device_probe import probe_device
from ...workers.machine_memory import usable_memory_bytes
from ...workers.models.config import ModelConfig, sampling_defaults
from ...workers.models.sharding import ModelSharding
from ...workers.models.state_places import state_places
from ...workers.models.weights import open_checkpoint
from ...workers.window_pages import kept_window, most_pages
from ..config import MotetConfig
from ..replicas.disk_watch import full_disk_warning
from ..settings.setting_field import ConfigError, format_byte_size, shortest_byte_size
from .local_serve import check_port_is_free

TRIAL_BYTES = 64 << 10


def check_data_dir(data_dir: Path) -> None:
    """Makes the folder. Raises ConfigError unless it can be written."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir) as trial:
            trial.write(bytes(TRIAL_BYTES))  # on a full disk an empty file can be made
    except OSError as error:
        raise ConfigError("--data-dir", str(data_dir), f"a folder that can be written is needed: {error}") from error


def check_settings(config: MotetConfig) -> list[str]:
    """Warnings, a line each. Raises ConfigError, or ValueError for a model that cannot be served."""
    if config.placement.address is None:
        check_port_is_free(config.listen_host, config.access.port)
    full_disk = full_disk_warning(config.serving.data_dir, config.requests.min_free_bytes)
    return [*([full_disk] if full_disk else []), *check_sizes(config)]


def check_sizes(config: MotetConfig) -> list[str]:
    """Warnings and errors as of `check_settings`, of what an update may change while motet runs."""
    model = ModelConfig.from_folder(config.model_path)
    serving, block_size = config.serving, config.memory.block_size
    degree = config.placement.tensor_parallel
    try:
        sharding = ModelSharding(model, degree, expert_sharding=config.placement.expert_sharding)
    except ValueError as error:
        raise ConfigError("--tensor-parallel", degree, str(error)) from error
    element_bytes = PAGE_DTYPES[serving.dtype].itemsize
    page_bytes = model.num_layers * sharding.slab(block_size, serving.kv_dtype, element_bytes) * element_bytes
    try:
        num_state_pages = state_places(sharding, page_bytes, element_bytes).num_pages
    except ValueError as error:
        raise ConfigError("--block-size", block_size, str(error)) from error
    pool_bytes = config.memory.pool_bytes
    if serving.weights_dtype != "dtype" and model.experts is not None:
        raise ConfigError("--weights-dtype", serving.weights_dtype, EIGHT_BITS_EXPERTS)
    if serving.weights_dtype == "float8":
        _check_float8(sharding)
    if config.placement.address is None:  # nodes of a cluster check this themselves
        pool_bytes = _pool_bytes_here(config)
    if pool_bytes is not None and pool_bytes < page_bytes:
        size = shortest_byte_size(pool_bytes)
        raise ConfigError("--pool-bytes", size, f"one page of this model takes {page_bytes} bytes")
    open_checkpoint(config.model_path, "numpy")
    if serving.sampling_defaults == "model":
        sampling_defaults(config.model_path)
    warnings = []
    length = min(serving.max_model_len or model.max_model_len, model.max_model_len)
    if serving.max_model_len is not None and serving.max_model_len > length:
        warnings.append(
            f"--max-model-len {serving.max_model_len} is more than the model's {length}: {length} is served"
        )
    if model.longest is not None and model.longest > model.max_model_len:
        warnings.append(
            f"the context is {model.max_model_len} tokens, as max_position_embeddings in config.json says: its rotary "
            f"embedding is stretched to {model.longest}; max_position_embeddings = {model.longest} there serves them"
        )
    limits = config.step_limits
    if limits.max_num_sequences > limits.max_tokens_per_step:
        warnings.append(
            f"--max-num-sequences {limits.max_num_sequences} is more than the tokens of a step: "
            f"{limits.max_tokens_per_step} run at once; --max-tokens-per-step {limits.max_num_sequences} serves all"
        )
    if pool_bytes is None:
        return warnings  # a GPU's free memory is known once the model is loaded
    num_pages = pool_bytes // page_bytes
    window, full_layers = sharding.window_pages(block_size, serving.kv_dtype, element_bytes)
    window = kept_window(window, serving.device)
    num_needed = most_pages(length, block_size, window, limits.max_tokens_per_step, full_layers) + num_state_pages
    if num_pages < num_needed:
        num_tokens = max(0, num_pages - num_state_pages) * block_size
        warnings.append(
            f"the pool holds {num_tokens} tokens and the context has {length}: longer requests are "
            f"refused; --pool-bytes {num_needed * page_bytes} holds a whole one, without its adapter"
        )
    return warnings


def _pool_bytes_here(config: MotetConfig) -> int | None:
    """Size of a worker's pool on this machine; None: it depends on a GPU's free memory. Raises ConfigError."""
    device = probe_device(config.serving.device)
    config.worker_device.check(device)
    pool_bytes = config.memory.pool_bytes
    num_workers = config.scaling_policy.max_gangs * config.placement.tensor_parallel
    if device.kind == "cpu" and pool_bytes is None:
        sharers = None if config.placement.address else num_workers
        pool_bytes = cpu_pool_bytes(usable_memory_bytes(), sharers)
    memory_bytes, num_pools = device.memory_bytes, 1
    if config.placement.gang_num_gpus:  # else there is a GPU for each worker
        num_pools = config.worker_device.num_pools_on_a_gpu(num_workers)
    if memory_bytes is None:
        memory_bytes, num_pools = psutil.virtual_memory().total, num_workers
    if pool_bytes is not None and pool_bytes * num_pools > memory_bytes:
        has, device_name = format_byte_size(memory_bytes), "this machine" if device.kind == "cpu" else "a GPU here"
        size = shortest_byte_size(pool_bytes)
        raise ConfigError("--pool-bytes", size, f"{device_name} has {has} of memory: give less")
    return pool_bytes


def _check_float8(sharding: ModelSharding) -> None:
    """Raises ConfigError for a base whose parts a GPU does not multiply with weights of eight bits."""
    for num_in, num_out in sharding.linears:
        if num_in % FLOAT8_MULTIPLE or num_out % FLOAT8_MULTIPLE:
            raise ConfigError(
                "--weights-dtype",
                "float8",
                f"each of {sharding.degree} workers has a linear with {num_in} inputs and {num_out} outputs, and "
                f"multiples of {FLOAT8_MULTIPLE} are needed: weights of dtype are served",
            )
