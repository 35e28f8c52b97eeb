"""Settings of one router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RouterConfig:
    """What the HTTP front needs to know that no collaborator tells it."""

    model_name: str  # the base's name in `model`
    spool_path: Path  # uploads lie here while they arrive; made if absent; the store's file system is the best one
    max_upload_bytes: int = 2 << 30  # of adapter_model.safetensors
    max_body_bytes: int = 16 << 20  # of a JSON request
    max_open_uploads: int = 8  # that arrive at once; more wait their turn unread
    upload_idle_s: float = 60.0  # an upload from which nothing arrives for so long gives up its turn
    min_free_bytes: int = 256 << 20  # of disk that uploads leave to the registry and the logs
    max_sequences_per_request: int = 128  # prompts times n
    ready_interval_s: float = 5.0  # how long one proof that a token can be served is believed
    ready_timeout_s: float = 10.0  # how long /ready waits for that token
    scales_from_zero: bool = False  # there may be no gang while nobody asks, and a request brings one

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
