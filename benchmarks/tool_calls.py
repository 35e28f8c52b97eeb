"""Whether tool calls that must fit do: of random tools, by the demo model and its adapters, through a router.

A call of a tool that is named, of one that is required, and of strict tools, as the model likes, in turn. All arguments
must be JSON and valid by the schema. A call that the context cuts off is counted as such.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from motet.router.text.text import TextService
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.random_tools import random_tools
from motet.tests.rigs.router_rig import BASE

DEMO = Path(__file__).resolve().parents[1] / "examples/demo"
ADAPTERS = {name: DEMO / "adapters" / name for name in ("agent", "pirate")}
QUESTIONS = ("What is the capital of France?", "How far is it from Rome to Oslo?", "What is 3 times 4?")
MOST_AT_ONCE = 16


async def tally(client: httpx.AsyncClient, num: int, seed: int = 0) -> Counter[str]:
    """Of so many definitions: the calls, those that do not fit, and the answers that were cut off or have none."""
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def one(number: int) -> Counter[str]:
        async with places:
            return await _tally_of(client, random.Random(f"{seed}/{number}"), number)

    return sum(await asyncio.gather(*map(one, range(num))), Counter[str]())


async def _tally_of(client: httpx.AsyncClient, rng: random.Random, number: int) -> Counter[str]:
    tools = random_tools(rng)
    kind = ("required", "named", "strict")[number % 3]
    named = {"type": "function", "function": {"name": rng.choice(tools)[0]}}
    body: dict[str, Any] = {
        "model": rng.choice((BASE, *ADAPTERS)) if kind != "strict" else "agent",
        "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": kind == "strict"}}
            for name, schema in tools
        ],
        "tool_choice": {"required": "required", "named": named, "strict": "auto"}[kind],
        "parallel_tool_calls": False,
        "seed": number,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "length":
        return Counter(cut=1)
    calls = choice["message"].get("tool_calls", [])
    fit = [_fits(call["function"], dict(tools)) for call in calls]
    return Counter(calls=len(calls), unfit=fit.count(False), without_call=not calls and kind != "strict")


def _fits(function: dict[str, str], tools: dict[str, dict[str, Any]]) -> bool:
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return False
    return bool(Draft202012Validator(tools[function["name"]]).is_valid(arguments))


async def measure(num: int) -> dict[str, float]:
    began_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        stock = Stock.make(DEMO / "base", ADAPTERS, Path(folder) / "store", block_size=16)
        text = TextService.from_folder(DEMO / "base")
        with stock.engine(num_pages=2000) as rig:
            found = await tally(client_of(EngineDispatcher(rig), stock, *ADAPTERS, text=text), num)
    counts = {name: found[name] for name in ("calls", "unfit", "cut", "without_call")}
    return {"definitions": num, **counts, "seconds": round(time.perf_counter() - began_at, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--definitions", type=int, default=1000, help="requests with random tools (default 1000)")
    options = parser.parse_args()
    print(json.dumps({"benchmark": "tool_calls", **asyncio.run(measure(options.definitions))}))


if __name__ == "__main__":
    main()
