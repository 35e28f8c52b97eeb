"""Settings of one gang's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..adapters.packing.layout import Dtype
from .fairness.tenant_counters import Scheduling

ExpertSharding = Literal["tensor", "expert"]
Device = Literal["cpu", "cuda", "auto"]
SlowKernels = Literal["allow", "refuse"]
SamplingDefaults = Literal["model", "openai"]
WeightsDtype = Literal["dtype", "float8", "int8"]
KVDtype = Literal["dtype", "float8"]
SmallSums = Literal["one-shot", "nccl"]
NanoBatches = Literal["auto", "off"]
Float8Part = Literal["weights", "KV"]
FLOAT32_ON_A_GPU = (
    "float32 is not served on a GPU, whose kernels spill their registers with it and take a minute to compile: "
    "bfloat16 is, and float32 with device cpu"
)
FLOAT8_CAPABILITY = (9, 0)  # a GPU's compute capability, at least
FLOAT8_MULTIPLE = 16  # of the inputs and outputs of each linear of a worker
FLOAT8_ON_A_CPU = "weights in float8 are for GPUs of compute capability 9.0 or more: CPUs serve those of dtype and int8"
INT8_ON_A_GPU = "weights in int8 are for CPUs: GPUs serve float8 and those of dtype"
FLOAT8_KV_ON_A_CPU = "KV of eight bits is for GPUs of compute capability 9.0 or more: CPUs serve that of dtype"
EIGHT_BITS_EXPERTS = "weights of eight bits are for dense bases, and this one has experts: those of dtype are served"
# Of a GPU, for later. Estimated, not measured: memory for sampling in all ways at once; copies of adapters and KV under
# way; buffers of cuBLAS, NCCL and Triton for shapes that a start does not run; fragmentation.
LATER_BYTES = 1 << 30
_LEAST_KV_HOST_BYTES = 1 << 30  # default for small pools
_KV_HOST_SHARE = 0.25  # of the pool: default for others
_MAX_KV_HOST_SHARE = 0.125  # of the machine's memory, for all workers of a gang


def default_kv_host_bytes(pool_bytes: int, memory_bytes: int, tensor_parallel: int) -> int:
    """Host memory of a worker for KV where no setting says it.

    Conversations that come back find little in a tier of a few hundredths of the pool, and most in one of a quarter.
    `memory_bytes`: of the machine, on which all workers of the gang may be.
    """
    target_bytes = max(_LEAST_KV_HOST_BYTES, int(_KV_HOST_SHARE * pool_bytes))
    return min(target_bytes, int(_MAX_KV_HOST_SHARE * memory_bytes) // tensor_parallel)


def why_not_float8(capability: tuple[int, int] | None, part: Float8Part) -> str | None:
    """Why a GPU of this compute capability, or a CPU (None), does not compute with eight bits; None: it does."""
    if capability is None:
        return FLOAT8_ON_A_CPU if part == "weights" else FLOAT8_KV_ON_A_CPU
    if capability >= FLOAT8_CAPABILITY:
        return None
    has, needed = (".".join(map(str, version)) for version in (capability, FLOAT8_CAPABILITY))
    served = "weights of dtype are served" if part == "weights" else "KV of dtype is served"
    return f"this GPU has the compute capability {has}, and {needed} or more is needed: {served}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes are bytes of each worker; counts are of the gang. A field with a default is no setting; the others have
    defaults and bounds with motet's settings."""

    model_path: Path  # folder in Hugging Face format
    store_path: Path  # content-addressed store of adapters
    device: Device  # auto: an NVIDIA GPU where there is one
    dtype: Dtype
    weights_dtype: WeightsDtype  # of the layers' linears; "dtype": that of all else
    kv_dtype: KVDtype  # "dtype": that of all else
    pool_bytes: int | None  # device pages, for KV and adapters alike; None: `cpu_pool_bytes`, or what a GPU has left
    pool_sharers: int | None  # workers that have pools in the memory of this machine, without a GPU; None: not known
    device_memory_share: float  # of a GPU's memory that a worker may take, its pool included, where pool_bytes is None
    host_bytes: int  # packed adapters kept in host memory; 0: each is read from the store
    kv_host_bytes: int | None  # pages of KV kept in host memory; 0: none; None: by the pool's size
    kv_disk_bytes: int  # and on disk, behind host memory; 0: none
    kv_disk_path: Path  # folder for these
    block_size: int  # tokens a page
    max_tokens_per_step: int  # token budget of a plan
    token_interval_s: float | Literal["auto"]  # target time of steps with decodes; 0: no limit
    max_num_sequences: int  # sequences that run at once
    reasons: Mapping[str, str]  # why sizes are as they are, by setting
    scheduling: Scheduling  # which sequence goes first: the least served tenant's, or the oldest
    prefix_cache: bool  # sequences of a tenant share the KV of common prefixes
    max_model_len: int | None  # None: what the model's config says
    num_threads: int  # of each worker's compute library
    cache_path: Path | None  # keeps what was compiled for this machine; None: .cache/motet in the user's home
    nano_batches: NanoBatches  # auto: the steps of a gang that are predicted to be faster in two
    small_sums: SmallSums  # over a gang's GPUs: by one kernel each where they can, or by NCCL as all others
    sampling_defaults: SamplingDefaults  # of requests that leave them open: the model's own, or OpenAI's
    slow_kernels: SlowKernels  # where no fast ones can be had: compute with plain ones, or do not start
    tensor_parallel: int  # workers of the gang
    expert_sharding: ExpertSharding  # workers share each expert's features, or ("expert") the experts
    step_deadline_s: float = 120.0  # a worker that takes longer over a step hangs
    store_deadline_s: float = 15.0  # a read of an adapter from the store that takes longer has failed
    start_deadline_s: float = 300.0  # for all workers to come up, before they load the model
    measures_threads: bool  # a worker alone on a CPU measures how many threads to use, up to num_threads

    def __post_init__(self) -> None:
        if self.kv_disk_bytes and self.kv_host_bytes == 0:
            raise ValueError("kv_disk_bytes needs kv_host_bytes above 0: pages reach the disk by way of host memory")

    def context_of(self, max_position_embeddings: int) -> int:
        """The longest sequence of a model with these positions, in tokens."""
        return min(self.max_model_len or max_position_embeddings, max_position_embeddings)
