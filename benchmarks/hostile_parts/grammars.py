"""A tenant that asks for hostile forms of answers without pause, several at a time, each a new one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from motet.benchmarks.rigs import form_attack
from motet.tests.rigs.neighbour import KEY_VARIABLE
from motet.tests.rigs.running_motet import KEYS, RunningMotet

from .beside_attack import beside_attack

TENANT = "globex"


async def grammars(seconds: float) -> dict[str, float]:
    """`grammars_p99_ratio`: of a neighbour's first tokens at a `motet serve`, router and gang."""
    return await asyncio.to_thread(beside_attack, "grammars", seconds, partial(_attack, "forms"))


async def refusals(seconds: float) -> dict[str, float]:
    """`refusals_p99_ratio`: beside as many clients, whose requests are ordinary, small and refused."""
    return await asyncio.to_thread(beside_attack, "refusals", seconds, partial(_attack, "refused"))


@contextmanager
def _attack(kind: str, motet: RunningMotet) -> Iterator[Mapping[str, int]]:
    statuses = dict[str, int]()
    command = [sys.executable, "-m", form_attack.__name__, motet.url.rpartition(":")[2], kind]
    environment = os.environ | {KEY_VARIABLE: KEYS[TENANT]}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as attackers:
        assert attackers.stdout is not None
        assert attackers.stdout.readline() == "attacking\n"
        try:
            yield statuses
        finally:
            said, _ = attackers.communicate()
            statuses |= json.loads(said)
