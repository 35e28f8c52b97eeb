"""Settings: memory."""

from __future__ import annotations

from typing import Annotated

from .setting import Bytes, BytesOrNone, Count, Setting, Share
from .setting_field import SettingGroup


class Memory(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory."""

    pool_bytes: Annotated[
        Bytes | None,
        Setting(
            "Memory of each worker, on its device, for the pages of KV and adapters.",
            "live",
            unset="on CPUs an eighth of the memory for all workers of a machine, with --address at most 1 GiB each; "
            "on a GPU what is left of --device-memory-share",
        ),
    ] = None
    device_memory_share: Annotated[
        Share,
        Setting(
            "Share of its GPU's memory that a worker may use without --pool-bytes, including what other processes use: "
            "it measures weights, the largest step and graphs, and the rest is its pool.",
            "live",
        ),
    ] = 0.9
    host_bytes: Annotated[
        BytesOrNone,
        Setting(
            "Host memory of each worker for packed adapters that are not in its pool. 0: none, they are read from the "
            "data folder.",
            "live",
        ),
    ] = 4 << 30
    kv_host_bytes: Annotated[
        BytesOrNone | None,
        Setting(
            "Host memory of each worker for KV that has no room in its pool, allocated on demand. 0: none.",
            "live",
            unset="a quarter of the pool, at least 1 GiB, at most an eighth of the machine for a gang",
        ),
    ] = None
    kv_disk_bytes: Annotated[
        BytesOrNone,
        Setting("Disk of each worker for KV that has no room in --kv-host-bytes, which it needs. 0: none.", "live"),
    ] = 0
    prefix_cache: Annotated[bool, Setting("Whether a tenant's requests with a common prefix share its KV.", "live")] = (
        True
    )
    block_size: Annotated[Count, Setting("Tokens in a page of KV. Adapters are packed for it.")] = 16
