"""Settings of one router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

AdapterBase = Literal["any", "warn", "match"]
VisionLora = Literal["refuse", "leave-out"]
UnknownAdapterFields = Literal["refuse", "warn"]
TextsWithControlTokens = Literal["prompts", "everywhere", "nowhere"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What the HTTP front needs beside its collaborators.

    A field with a default is no setting. Defaults and bounds of the others stand with motet's settings.
    """

    model_name: str  # the base's name in `model`
    spool_path: Path  # uploads lie here while they arrive; made if absent; the store's file system is the best one
    adapter_base: AdapterBase  # whether adapters may name another base: so, with a warning, or not
    vision_lora: VisionLora  # of what reads pictures, in adapters of a base whose text model is served: see settings
    unknown_adapter_fields: UnknownAdapterFields  # that PEFT does not have: see settings
    base_aliases: str  # more names of the base, with commas between them
    max_upload_bytes: int  # of adapter_model.safetensors
    max_body_bytes: int | None  # of a JSON request; None: what the context can hold (bodies/request_decoder.py)
    max_held_body_bytes: int = 128 << 20  # of JSON requests, of all tenants together, until they are decoded
    control_tokens: TextsWithControlTokens  # which texts of requests may write control tokens
    response_template: str  # of answers: auto, none, the name of a format, or a file
    strict_requests: bool  # what would be left out of a request, and named in a header, is refused
    max_file_bytes: int = 200 << 20  # of a file for a batch
    file_days: int  # after which files, and batches that have ended, are removed
    response_days: int  # for which responses are stored; 0: none are
    max_stored_responses: int = 20_000  # of a tenant
    max_batch_lines: int  # under way at once, of all batches together
    max_open_uploads: int = 8  # that arrive at once; more wait their turn unread
    max_tenant_uploads: int = 2  # of these, of one tenant
    upload_bytes_per_s: float = 64 << 10  # an upload that comes more slowly on average is given up
    upload_deadline_s: float = 3600.0  # as is one that has not come by then
    upload_idle_s: float = 60.0  # an upload that sends nothing for this time loses its turn
    adapter_folders: str  # that adapters may be loaded from, with commas between them; empty: none
    cors_origins: str  # of pages that may read answers, with commas between them; "*": of all; empty: of none
    min_free_bytes: int  # of disk that uploads leave to the registry and the logs
    max_sequences_per_request: int  # prompts times n
    ready_interval_s: float = 5.0  # how long one proof that a token can be served is believed
    ready_timeout_s: float = 10.0  # how long /ready waits for that token
    access_log: bool  # one line for each request
    scales_from_zero: bool  # there may be no gang without requests; the next request starts one


class CurrentConfig:
    """The config that a router goes by now. Its maker may put another in its place; readers ask for each request."""

    def __init__(self, config: RouterConfig) -> None:
        self.now = config
