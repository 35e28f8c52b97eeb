"""Settings of one router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RouterConfig:
    """The settings of the HTTP front and of its handlers."""

    model_name: str  # the value of `model` by which requests ask for the base
    spool_path: Path  # folder for uploads while they arrive; made if absent; best on the file system of the store
    max_upload_bytes: int = 2 << 30  # of adapter_model.safetensors
    max_body_bytes: int = 16 << 20  # of a JSON request
    max_open_uploads: int = 8  # uploads that are received at once; the bodies of others are not read until then
    upload_idle_s: float = 60.0  # an upload fails when none of its bytes arrive for this long
    min_free_bytes: int = 256 << 20  # of disk that uploads leave free for the registry and the logs
    max_sequences_per_request: int = 128  # prompts times n
    ready_interval_s: float = 5.0  # for how long after a token was served /ready answers without a probe
    ready_timeout_s: float = 10.0  # how long /ready waits for a probe's token
    scales_from_zero: bool = False  # without requests there may be no gang; a request makes one start

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name is empty: the name is needed by which requests ask for the base")
        for key in ("max_upload_bytes", "max_body_bytes", "max_open_uploads", "max_sequences_per_request"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} = {value!r}: a positive integer is needed")
        for key in ("upload_idle_s", "ready_interval_s", "ready_timeout_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} = {getattr(self, key)!r}: a positive number of seconds is needed")
