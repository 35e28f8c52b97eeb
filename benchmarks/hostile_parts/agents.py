"""What coding agents send with each turn, to a router whose gang answers at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from motet.tests.clients.agent_requests import REQUESTS, num_answered
from motet.tests.rigs.router_rig import BASE, HEADERS, RouterRig, text_service
from motet.tests.router.test_tool_calls import TEMPLATE


async def agents(seconds: float) -> dict[str, float]:
    """`agents_ok`: the part of all recorded requests that is answered. `seconds` is not used."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        rig = RouterRig(Path(folder), text_service(TEMPLATE))
        rig.dispatcher.context, rig.dispatcher.answer = 4096, rig.ids("the fox")
        async with rig.client() as client:
            return {"agents_ok": await num_answered(client, BASE, HEADERS) / len(REQUESTS)}
