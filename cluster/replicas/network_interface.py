"""Names of this machine's network interfaces."""

from __future__ import annotations

import psutil


def interface_of(ip_address: str) -> str | None:
    """The interface that has the address; None: no interface has it, for example because addresses are translated."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == ip_address for one in addresses):
            return name
    return None
