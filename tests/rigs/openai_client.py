"""OpenAI's own client of a router behind a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai

from motet.tests.rigs.router_rig import HEADERS, RouterRig, serving


@asynccontextmanager
async def openai_client(rig: RouterRig) -> AsyncIterator[openai.AsyncOpenAI]:
    """It tries nothing twice."""
    with serving(rig.app) as url:
        key = HEADERS["Authorization"].removeprefix("Bearer ")
        async with openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0) as client:
            yield client
