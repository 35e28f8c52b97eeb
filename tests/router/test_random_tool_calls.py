"""Tool calls that must fit their schemas, by the demo model: a few of what `benchmarks/tool_calls.py` counts."""

from __future__ import annotations

from motet.benchmarks.tool_calls import measure


async def test_calls_of_random_tools_fit_their_schemas() -> None:
    found = await measure(20)
    assert found["unfit"] == found["without_call"] == 0
    assert found["calls"] + found["cut"] >= 13, "of tools that are named or required"
    assert found["calls"] > 10
