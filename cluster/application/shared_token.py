"""The secret that routers show to gangs: the one that was given, or one that all make together."""

from __future__ import annotations

import secrets

from ...adapters.registry.launches import Launches
from ...adapters.registry.registry import connect
from ..launch_secrets import LaunchSecrets

NUM_BYTES = 32


async def shared_token(given: LaunchSecrets) -> str:
    """The same at every caller with these secrets. Raises RegistryUnavailable."""
    if given.token is not None:
        return given.token
    client = connect(given.redis_url)
    try:
        return await Launches(client).shared_token(secrets.token_hex(NUM_BYTES))
    finally:
        await client.aclose()
