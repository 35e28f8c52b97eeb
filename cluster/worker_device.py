"""What a worker of a gang asks of the device that it computes on, and what is refused before any gang starts."""

from __future__ import annotations

from dataclasses import dataclass

from ..adapters.packing.layout import Dtype
from ..workers.config import FLOAT32_ON_A_GPU, Device, KVDtype, WeightsDtype
from ..workers.device_probe import DeviceFacts
from .settings.setting_field import ConfigError

SHARED_BY_GANGS = (
    "gangs that share a GPU would each take what the others have left of it: give --pool-bytes, with which all fit, "
    "or whole GPUs"
)
ROUNDING = 1e-6  # of shares of a GPU, such as thirds
SHARED_BY_WORKERS = "the workers of a gang need a GPU each, as NCCL connects no two on one: a whole number is accepted"


@dataclass(frozen=True, kw_only=True)
class WorkerDevice:
    """Settings that a device has to suit. Plain data, because it travels to nodes."""

    device: Device
    dtype: Dtype
    weights_dtype: WeightsDtype
    kv_dtype: KVDtype
    pool_bytes: int | None
    gang_num_gpus: float  # that Ray counts for a worker
    tensor_parallel: int

    def __post_init__(self) -> None:
        """Raises ConfigError for what no node can serve."""
        if self.device == "cpu":
            self.check(DeviceFacts("cpu"))
        elif self.device == "cuda" or self.gang_num_gpus:
            self.check(DeviceFacts("cuda"))
        if self.device != "cpu" and self._is_shared:
            if self.tensor_parallel > 1:
                raise ConfigError("--gang-num-gpus", self.gang_num_gpus, SHARED_BY_WORKERS)
            if self.pool_bytes is None:
                raise ConfigError("--gang-num-gpus", self.gang_num_gpus, SHARED_BY_GANGS)

    @property
    def _is_shared(self) -> bool:
        """Ray may put several workers on one GPU."""
        return self.gang_num_gpus > 0 and int(1 / self.gang_num_gpus + ROUNDING) > 1

    def check(self, facts: DeviceFacts) -> None:
        """Raises ConfigError for what such a device does not serve."""
        if facts.kind == "cuda" and self.dtype == "float32":
            raise ConfigError("--dtype", self.dtype, FLOAT32_ON_A_GPU)
        if (problem := facts.why_not(self.weights_dtype, "weights")) is not None:
            raise ConfigError("--weights-dtype", self.weights_dtype, problem)
        if (problem := facts.why_not(self.kv_dtype, "KV")) is not None:
            raise ConfigError("--kv-dtype", self.kv_dtype, problem)

    def num_pools_on_a_gpu(self, num_workers: int) -> int:
        """How many of `num_workers` on one node share a GPU. Workers without a GPU of Ray's all use the first."""
        if not self.gang_num_gpus:
            return num_workers
        return max(1, min(num_workers, int(1 / self.gang_num_gpus + ROUNDING)))

    def check_shared(self, facts: DeviceFacts, num_workers: int) -> None:
        """Raises ConfigError if `num_workers` must not be on one node because Ray counts no GPU for them."""
        if facts.kind == "cpu" or self.gang_num_gpus or num_workers < 2:
            return
        if self.tensor_parallel > 1:
            raise ConfigError("--gang-num-gpus", self.gang_num_gpus, SHARED_BY_WORKERS + ", or --device cpu")
        if self.pool_bytes is None:
            raise ConfigError("--gang-num-gpus", self.gang_num_gpus, SHARED_BY_GANGS + ", or --device cpu")
