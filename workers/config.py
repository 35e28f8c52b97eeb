"""Settings of one gang's engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..adapters.packing.layout import Dtype

ExpertSharding = Literal["tensor", "expert"]
Device = Literal["cpu", "cuda", "auto"]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes are bytes of one worker; counts are per gang."""

    model_path: Path  # folder in Hugging Face format
    store_path: Path  # content-addressed store of adapters
    device: Device = "auto"  # auto: an NVIDIA GPU where there is one
    dtype: Dtype = "bfloat16"
    pool_bytes: int = 1 << 30  # device pages, for KV and adapters alike
    host_bytes: int = 4 << 30  # packed adapters kept in host memory; 0: each is read from the store
    kv_host_bytes: int = 1 << 30  # pages of KV kept in host memory; 0: none
    kv_disk_bytes: int = 0  # and on disk, behind host memory; 0: none
    kv_disk_path: Path | None = None  # folder for these
    block_size: int = 16  # tokens a page
    max_tokens_per_step: int = 512  # token budget of a plan
    max_num_sequences: int = 128  # sequences that run at once
    max_waiting_sequences: int = 4096  # that have no token yet; more are refused
    max_waiting_tokens: int = 4 << 20  # of their prompts
    prefix_cache: bool = True  # sequences of a tenant that begin alike share their KV
    max_model_len: int | None = None  # None: what the model's config says
    num_threads: int = 1  # threads of the compute library
    cache_path: Path | None = None  # keeps what was compiled for this machine; None: .cache/motet in the user's home
    tensor_parallel: int = 1  # workers of the gang
    expert_sharding: ExpertSharding = "tensor"  # workers share each expert's features, or ("expert") the experts
    step_deadline_s: float = 120.0  # a worker that takes longer over a step hangs
    start_deadline_s: float = 300.0  # for all workers to come up, before they load the model

    def __post_init__(self) -> None:
        for key in (
            "pool_bytes",
            "block_size",
            "max_tokens_per_step",
            "max_num_sequences",
            "max_waiting_sequences",
            "max_waiting_tokens",
            "num_threads",
            "tensor_parallel",
        ):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} = {value!r}: a positive integer is needed")
        for key in ("host_bytes", "kv_host_bytes", "kv_disk_bytes"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{key} = {value!r}: zero or a positive integer is needed")
        if self.kv_disk_bytes and not self.kv_host_bytes:
            raise ValueError(f"kv_disk_bytes = {self.kv_disk_bytes}: pages come to the disk by way of kv_host_bytes, 0")
        if self.kv_disk_bytes and self.kv_disk_path is None:
            raise ValueError(f"kv_disk_bytes = {self.kv_disk_bytes}: kv_disk_path, a folder for them, is needed")
        if self.device not in get_args(Device):
            raise ValueError(f"device = {self.device!r}: {', '.join(get_args(Device))} are accepted")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype = {self.dtype!r}: float32 or bfloat16 is accepted")
        if self.expert_sharding not in ("tensor", "expert"):
            raise ValueError(f"expert_sharding = {self.expert_sharding!r}: tensor or expert is accepted")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len = {self.max_model_len!r}: a positive integer or none is needed")

    def context_of(self, max_position_embeddings: int) -> int:
        """The longest sequence of a model of so many positions, in tokens."""
        return min(self.max_model_len or max_position_embeddings, max_position_embeddings)
