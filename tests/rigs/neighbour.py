"""A tenant that does nothing but request short answers, and notes how long each first token takes.

It runs in a process of its own, so that what a test does beside it costs it nothing but the server's time.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from motet.tests.rigs.held_loop import HeldLoop
from motet.tests.rigs.patience import PATIENCE_S

KEY_VARIABLE = "NEIGHBOUR_KEY"
TIMEOUT_S = 30.0  # a chat that takes longer has failed
NUM_CHATS_MIN = 30  # of a measurement
QUIET_S, ATTACKED_S = 3.0, 6.0  # how long each lasts
ROUNDS = 4
IDLE_PROCESSORS = 0.5  # a machine with less is busy: what runs waits for what else runs
LOOP_HELD_S = 0.025  # a bound of the metric's buckets; tests/router/test_loop_holds.py holds each callback to 10 ms


@dataclass
class Waits:
    """What one measurement has found: a time for each chat that was answered, a reason for each that was not."""

    first_token_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def quantile_s(self, share: float) -> float:
        """The time within which this share of the chats had their first token; endless if too few had one at all."""
        waits = sorted([*self.first_token_s, *(float("inf") for _ in self.errors)])
        return waits[min(int(share * len(waits)), len(waits) - 1)] if waits else float("inf")

    def __str__(self) -> str:
        p50_ms, p99_ms = (1000 * self.quantile_s(share) for share in (0.5, 0.99))
        return f"{len(self.first_token_s)} chats, p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms, errors {self.errors[:3]}"


@dataclass(frozen=True)
class Neighbour:
    """One tenant at a running motet. Each measurement asks one chat after the other, on a new connection each."""

    url: str
    key: str
    model: str

    def measured_for(self, seconds: float) -> Waits:
        """Times while nothing else happens."""
        with self.measuring() as waits:
            time.sleep(seconds)
        return waits

    @contextmanager
    def measuring(self) -> Iterator[Waits]:
        """Measures while the block runs, and a little longer if that was too short for `NUM_CHATS_MIN`.

        What is yielded is filled when the block ends.
        """
        waits = Waits()
        process = subprocess.Popen(
            [sys.executable, "-m", "motet.tests.rigs.neighbour", self.url, self.model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {KEY_VARIABLE: self.key},
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "asking\n"
            yield waits
            said, _ = process.communicate("enough\n", timeout=PATIENCE_S)
            assert process.returncode == 0, "the neighbour broke"
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        found = json.loads(said)
        waits.first_token_s += found["first_token_s"]
        waits.errors += found["errors"]


def are_kept(
    quiet: Sequence[Waits], attacked: Waits, held: HeldLoop, num_idle_processors: float, at_most: float
) -> bool:
    """Whether p50 and p99 of an attack are within `at_most` times those in quiet, of which the slowest counts.

    Attackers and the measuring client take the machine's time as well, enough for one wait in a hundred: while no
    processor idles, p99 is that of the router's loop, in CPU time of its process, within LOOP_HELD_S.
    """

    def ratio(share: float) -> float:
        return attacked.quantile_s(share) / max(waits.quantile_s(share) for waits in quiet)

    if attacked.errors or ratio(0.5) > at_most:
        return False
    is_busy = num_idle_processors < IDLE_PROCESSORS
    return ratio(0.99) <= at_most or (is_busy and held.quantile_s(0.99) <= LOOP_HELD_S)


def hold(
    neighbour: Neighbour,
    attack: Callable[[], AbstractContextManager[object]],
    loop: Callable[[], AbstractContextManager[HeldLoop]],
    *,
    at_most: float,
    quiet_s: float = QUIET_S,
    attacked_s: float = ATTACKED_S,
) -> None:
    """Fails unless the neighbour's waits are kept, by `are_kept`, and all its chats answered.

    The attack is under way inside its context manager. `loop` measures the router's. Quiet is measured before and after
    an attack; a round in which the machine was busy with something else is done again.
    """
    seen = []
    for _ in range(ROUNDS):
        before = neighbour.measured_for(quiet_s)
        with loop() as held:
            psutil.cpu_times_percent()  # the next call returns the time since this one
            with attack(), neighbour.measuring() as attacked:
                time.sleep(attacked_s)
            idle = psutil.cpu_times_percent().idle / 100
        after = neighbour.measured_for(quiet_s)

        seen.append(f"quiet {before} and {after}; attacked {attacked}, {held}, {idle:.0%} idle")
        if are_kept((before, after), attacked, held, idle * (os.cpu_count() or 1), at_most):
            print(seen[-1])
            return
    raise AssertionError(f"p50 or p99 above {at_most:g} times quiet:\n" + "\n".join(seen))


def _ask(host: str, port: int, key: str, model: str) -> float:
    """Seconds from the request to its first token. Raises OSError, HTTPException or ValueError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Which city is the capital of France?"}],
        "max_tokens": 2,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Connection": "close"}
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        started = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{response.status} {response.read(300)!r}")
        first_token_s = None
        while line := response.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ValueError(str(event))
                if first_token_s is None and any(choice["delta"].get("content") for choice in event["choices"]):
                    first_token_s = time.perf_counter() - started
            elif line.startswith(b"data: [DONE]"):
                if first_token_s is None:
                    raise ValueError("no token")
                return first_token_s
        raise ValueError("the stream was cut")
    finally:
        connection.close()


def _main(url: str, model: str) -> None:
    """Asks until a line comes in, then prints what was found."""
    import threading

    parsed = urlsplit(url)
    assert parsed.hostname is not None and parsed.port is not None
    found = Waits()
    enough = threading.Event()

    def wait_for_line() -> None:
        sys.stdin.readline()
        enough.set()

    threading.Thread(target=wait_for_line, daemon=True).start()
    print("asking", flush=True)
    while not enough.is_set() or (len(found.first_token_s) < NUM_CHATS_MIN and not found.errors):
        try:
            found.first_token_s.append(_ask(parsed.hostname, parsed.port, os.environ[KEY_VARIABLE], model))
        except (OSError, http.client.HTTPException, ValueError) as error:
            found.errors.append(f"{type(error).__name__}: {error}")
    print(json.dumps({"first_token_s": found.first_token_s, "errors": found.errors}), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
