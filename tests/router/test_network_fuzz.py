"""Engine, router and two gangs over a network that breaks in every way: by seeds, in simulated time.

`--network-seeds` says how many, `--first-seed` where to begin. A seed that fails fails again.
"""

from __future__ import annotations

from collections import Counter

import pytest

from motet.router.fleet import leader_connection
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.network_fuzz import Run
from motet.tests.rigs.simulated_time import run_simulated
from motet.workers.leader.routed_sequences import RoutedSequences
from motet.workers.leader.sequence_journal import SequenceJournal
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.wire.messages import SequenceUpdate

pytestmark = pytest.mark.slow
NUM_PARTS = 8  # of the seeds, so that a failure names few of them
SEEDS_UNTIL_FOUND = 60  # in which an injected bug must show


async def _run(seed: int, num_events: Counter[str]) -> None:
    run = Run(seed)
    await run.run()
    num_events.update(run.num_events)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_each_token_once_and_nothing_left(part: int, request: pytest.FixtureRequest) -> None:
    first, num_seeds = request.config.getoption("--first-seed"), request.config.getoption("--network-seeds")
    num_events: Counter[str] = Counter()
    seeds = range(first + part, first + num_seeds, NUM_PARTS)
    for seed in seeds:
        try:
            run_simulated(_run(seed, num_events))
        except BaseException as error:
            error.add_note(f"again with --first-seed {seed} --network-seeds 1")
            raise
    if len(seeds) >= 20:
        kinds = ("cut", "blip", "stall", "silence", "refuse", "slow", "kill", "drain", "fail", "move")
        assert all(num_events[kind] for kind in kinds), num_events


def test_what_gangs_computed_is_charged_to_the_token() -> None:
    """Clients leave, come back and run out of time, and nothing else goes wrong."""
    for seed in range(12):
        run_simulated(Run(seed, is_quiet=True).run())


def test_it_finds_a_gang_that_counts_positions_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    post_init = GrowingSequence.__post_init__

    def forgetful(self: GrowingSequence) -> None:
        post_init(self)
        self.num_counted = 0  # what other gangs have counted

    monkeypatch.setattr(GrowingSequence, "__post_init__", forgetful)
    _finds("charged twice")


def _finds(what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        _run_until_found()


def _run_until_found() -> None:
    for seed in range(SEEDS_UNTIL_FOUND):
        run_simulated(_run(seed, Counter()))


def test_it_finds_orphans_that_live_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutedSequences, "disown", lambda self, stream, names: None)
    _finds("in two gangs|no client wants")


def test_it_finds_a_journal_that_forgets_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SequenceJournal.record

    def forgetful(self: SequenceJournal, update: SequenceUpdate, now: float) -> None:
        entry = self._entries.get(update.sequence_id)
        if entry is None or entry.owner is not None or len(entry.token_ids) % 7:  # a token of an orphan
            record(self, update, now)

    monkeypatch.setattr(SequenceJournal, "record", forgetful)
    _finds("not the right one|before its end|assert")


def test_it_finds_a_move_that_does_not_wait_for_the_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router sends a sequence on at once, and its old gang only gets a notice."""

    def withdraw(self: leader_connection.LeaderConnection, sequence: OpenSequence, target: str) -> None:
        del self._sequences[self._ids.pop(sequence)], self._unbegun[sequence]
        sequence.move(self, None)
        self._on_withdrawn(sequence, target)

    monkeypatch.setattr(leader_connection.LeaderConnection, "withdraw", withdraw)
    _finds("in two gangs|no client wants|left in an engine")


def test_it_finds_a_router_that_keeps_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = leader_connection.LeaderConnection._forget

    def keeping(self: leader_connection.LeaderConnection, sequence: OpenSequence) -> None:
        unbegun = self._unbegun.get(sequence)
        forget(self, sequence)
        if unbegun is not None:
            self._unbegun[sequence] = unbegun

    monkeypatch.setattr(leader_connection.LeaderConnection, "_forget", keeping)
    _finds("keeps a sequence")
