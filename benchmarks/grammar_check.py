"""What a new schema of 20 KB costs at a router, and what a hostile tenant's grammars cost its neighbour there.

The neighbour sends new schemas; p99 of how long each takes until its grammar is there, alone and while another tenant
sends hostile ones without pause. The gang's part is in `benchmarks/structured.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from contextlib import suppress

import msgspec

from motet.router.grammars.check_process import MAX_GRAMMAR_BYTES
from motet.router.grammars.grammar_check import GrammarCheck
from motet.router.grammars.response_format import WantedGrammar
from motet.router.http.errors import ApiError
from motet.tests.rigs.hostile_grammars import hostile_grammars

VOCAB_SIZE = 151_936
PAUSE_S = 0.08  # between the neighbour's requests: it keeps within its share of CPU


def schema_of_20_kb(salt: str) -> WantedGrammar:
    field = {"type": "string", "description": "a" * 40, "minLength": 1, "maxLength": 200}
    properties = {f"{salt}_{number}": field for number in range(170)}
    return WantedGrammar("json", "json", {"type": "object", "properties": properties, "required": [*properties]})


async def waits_ms(check: GrammarCheck, name: str, num: int) -> list[float]:
    found = []
    for number in range(num):
        wanted = schema_of_20_kb(f"{name}{number}")
        began_at = time.perf_counter()
        await check.lark("neighbour", wanted, VOCAB_SIZE)
        found.append((time.perf_counter() - began_at) * 1e3)
        await asyncio.sleep(PAUSE_S)
    return found


async def attack(check: GrammarCheck, grammars: list[WantedGrammar]) -> None:
    for number in itertools.count():
        for wanted in grammars:
            with suppress(ApiError):  # another name of the field makes it one that is not known
                await check.lark("hostile", msgspec.structs.replace(wanted, param=f"form {number}"), VOCAB_SIZE)


async def measure(num: int) -> dict[str, float]:
    check = GrammarCheck({})
    await waits_ms(check, "warm", 3)
    alone = await waits_ms(check, "alone", num)
    # Larger ones end in the process that decodes their bodies.
    grammars = [one for one in hostile_grammars(0) if len(msgspec.msgpack.encode(one)) <= MAX_GRAMMAR_BYTES]
    attackers = [asyncio.create_task(attack(check, grammars)) for _ in range(8)]
    beside = await waits_ms(check, "beside", num)
    for task in attackers:
        task.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    p99 = [statistics.quantiles(waits, n=100)[98] for waits in (alone, beside)]
    return {
        "new_schema_ms": statistics.median(alone),
        "alone_p99_ms": p99[0],
        "beside_hostile_p99_ms": p99[1],
        "neighbour_p99_ratio": p99[1] / p99[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=200, help="that the neighbour sends each time (default 200)")
    options = parser.parse_args()
    found = asyncio.run(measure(options.schemas))
    print(json.dumps({"benchmark": "grammar_check", **{name: round(value, 2) for name, value in found.items()}}))


if __name__ == "__main__":
    main()
