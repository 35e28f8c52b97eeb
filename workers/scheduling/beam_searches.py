"""Beams fork and die in the scheduler: how their sequences share pages, begin and leave.

Beams that fork share all pages, the last one too, which is not full. A beam that writes to a page that others have
copies it first (`DecodePlanner`). A preempted search leaves with all beams, and waits as one sequence: it begins again
with its root alone, and the other beams join it (`DecodePlanner.join_beams`) once their common pages are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

import msgspec

from ..fairness.page_times import PageTimes
from ..fairness.tenant_counters import TenantCounters
from ..memory.paged_memory import PagedMemory
from ..plan import SampledToken
from ..wire.beams import NEW_STATE, BeamRound, BeamRules, best_candidates, choose, forks
from ..wire.messages import SamplingParams, SequenceUsage, TokenLogprobs, total_usage
from .growing_sequence import GrowingSequence
from .running_sequences import RunningSequences

# One beam search in a gang: its beams are sequences that share pages, and that get their tokens together.


class BeamGroup:
    """Each live beam is at a place of its own, which is a sequence. The first place is the root's: it stands for the
    search in the queue, has always a beam, and begins alone.
    """

    def __init__(self, root: GrowingSequence, rules: BeamRules) -> None:
        """`root`: with the prompt alone. Raises ValueError if the search cannot be so far as the request says."""
        self.root, self.rules = root, rules
        so_far = root.request.beams_so_far
        self.state = NEW_STATE if so_far is None else so_far.state(rules)
        beams = [list[int]()] if so_far is None else so_far.beams
        self.places = [root]
        self.live = [*range(len(beams))]  # the place of each live beam, the best first
        self.pending_beams = beams[1:]  # tokens of the beams whose places are not there yet
        self.rows: dict[GrowingSequence, SampledToken | None] = {}  # of this round; None: not finite
        self.num_generated = (root.request.usage or SequenceUsage()).num_generated_tokens
        self.num_dropped = 0  # rows of rounds that came to nothing, as the search was preempted
        self.is_reported = False  # a round was
        root.beams = self
        root.sampling = sampling_of(rules)
        if beams[0]:
            root.token_ids += beams[0]
            root.num_given_tokens = len(root.token_ids)
            root.num_counted = len(root.token_ids) - 1  # the newest token was chosen elsewhere, and not computed

    def add_places(self, num_places: int, ids: Iterable[int]) -> None:
        """Makes places until there are so many, with these ids."""
        root = self.root
        prompt = root.token_ids[: root.num_prompt_tokens]
        for number, sequence_id in zip(range(len(self.places), num_places), ids, strict=False):
            beam_tokens = self.pending_beams[number - 1] if number <= len(self.pending_beams) else []
            place = GrowingSequence(
                msgspec.structs.replace(root.request, sequence_id=sequence_id, usage=None),
                root.arrival + number,
                root.seed,
                prompt + beam_tokens,
                root.stop_ids,
                root.max_length,
                full_layers=root.full_layers,
                key_chain=root.key_chain,
                num_adapter_pages=root.num_adapter_pages,
            )
            place.beams, place.sampling, place.counter = self, root.sampling, root.counter
            place.num_counted = max(0, len(place.token_ids) - 1)
            self.places.append(place)
        self.pending_beams = self.pending_beams if len(self.places) <= len(self.pending_beams) else []

    def drop_rows(self) -> int:
        """What has come of the round is dropped, as no beam runs any more. Returns the number of rows."""
        num_rows = len(self.rows)
        for beam in self.rows:
            beam.num_counted = len(beam.token_ids) - 1  # its newest token is computed, and charged, with the next row
        self.num_dropped += num_rows
        self.rows.clear()
        return num_rows

    @property
    def beams(self) -> list[GrowingSequence]:
        """Of the live beams, the best first, as far as their places are there."""
        return [self.places[place] for place in self.live if place < len(self.places)]

    @property
    def is_complete(self) -> bool:
        """All live beams have been computed: the round can be chosen."""
        return len(self.rows) == len(self.live)

    def advance(self) -> tuple[BeamRound, list[tuple[int, int, int]]]:
        """Chooses the round. Returns it, and of each beam that goes on its place, its parent's and its token."""
        rows = [self.rows[beam] for beam in self.beams]
        self.num_generated += len(rows)
        self.rows.clear()
        logprobs = list[TokenLogprobs]()
        for row in rows:
            assert row is not None and row.logprobs is not None
            logprobs.append(row.logprobs)
        beam_round = best_candidates(self.state.totals, logprobs, self.rules)
        choice = choose(self.state, beam_round.candidates, self.rules, lambda _: False)
        chosen = [beam_round.candidates[index] for index in choice.live]
        parents = [self.live[candidate.parent] for candidate in chosen]
        self.state, self.live = choice.state, forks(parents, max(len(self.places), len(chosen)))
        return beam_round, [*zip(self.live, parents, [candidate.token_id for candidate in chosen], strict=True)]


def sampling_of(rules: BeamRules) -> SamplingParams:
    """With which a worker computes the rows that a round is chosen from."""
    return SamplingParams(max_tokens=rules.max_tokens, temperature=0.0, num_logprobs=rules.num_candidates)


class BeamSearches:
    """All searches of a gang, waiting ones included."""

    def __init__(
        self,
        memory: PagedMemory,
        running: RunningSequences,
        counters: TenantCounters,
        times: PageTimes,
        leave: Callable[[GrowingSequence], None],
        block_size: int,
        most_places: int,
    ) -> None:
        """`leave` ends the run of a sequence. `most_places`: for sequences that run at once."""
        self._memory, self._running, self._counters, self._times = memory, running, counters, times
        self._leave, self._block_size, self._most_places = leave, block_size, most_places
        self._groups: dict[int, BeamGroup] = {}  # by the root's id
        self._ids = count(-1, -1)  # of places: no request has such ids
        self.joining: dict[BeamGroup, None] = {}  # that run, and lack some of their beams

    def add(self, root: GrowingSequence) -> None:
        """A search arrives. Raises ValueError for one that cannot be so far."""
        request = root.request
        assert request.beams is not None
        group = BeamGroup(root, request.beams)
        root.num_places = self._num_places(group)
        self._groups[root.sequence_id] = group

    def forget(self, group: BeamGroup) -> None:
        """The search has ended; none of its beams runs."""
        del self._groups[group.root.sequence_id]

    def take_row(self, beam: GrowingSequence, row: SampledToken | None) -> BeamGroup:
        """What may follow one of the beams was computed. Returns the search."""
        group = beam.beams
        assert group is not None
        group.rows[beam] = row
        root = group.root
        if beam is root and root.num_counted < root.num_prompt_tokens:  # its last token was computed like a decode
            root.num_computed_prompt_tokens += 1
            root.num_counted = root.num_prompt_tokens
        if len(group.rows) < len(group.live) and beam is root:
            group.add_places(len(group.live), self._ids)
            if any(place.sequence_id not in self._running.by_id for place in group.beams):
                self.joining[group] = None
        return group

    def advance(self, group: BeamGroup) -> BeamRound:
        """Chooses a round that is complete: beams fork and die. None is left at the end of the search."""
        beam_round, chosen = group.advance()
        group.add_places(len(chosen), self._ids)
        places = group.places
        for place, parent, _ in chosen:
            if place != parent:
                self._fork(places[place], places[parent])
        for number, each in enumerate(places):
            if chosen and number not in group.live and each.sequence_id in self._running.by_id:
                self.leave(each)
        for place, _, token_id in chosen:
            places[place].token_ids.append(token_id)
        self._running.num_uncomputed += len(chosen)
        if chosen:
            self._set_places(group)
        return beam_round

    def enter(self, beam: GrowingSequence, num_adapter_pages: int) -> None:
        """The beam begins to run on the pages that it has."""
        root = beam.beams.root if beam.beams is not None else beam
        beam.counter = self._counters.join(root.request.tenant, root.request.weight, root.request.is_background)
        beam.counter_at_start = root.counter_at_start
        self._running.add(beam)
        if beam.adapter_digest is not None:
            self._memory.adapters.acquire(beam.adapter_digest)
        self._times.start(beam.page_use, beam.num_held_pages, beam.adapter_digest, num_adapter_pages)

    def leave(self, place: GrowingSequence) -> None:
        """A beam that is not the root stops running."""
        self._leave(place)
        self._counters.leave(place.counter)

    def dissolve(self, group: BeamGroup) -> None:
        """All beams of a running search but the root stop running."""
        for place in group.places[1:]:
            if place.sequence_id in self._running.by_id:
                self.leave(place)
        self.joining.pop(group, None)
        self._running.set_places(group.root, self._num_places(group))

    def join(self, group: BeamGroup, beam: GrowingSequence) -> None:
        """A beam of the running search begins to run too."""
        self.enter(beam, self._num_adapter_pages(group.root))
        self._set_places(group)

    def usage(self, group: BeamGroup) -> SequenceUsage:
        """What the search has cost: of a round, each beam generates a token."""
        root = group.root
        pages = total_usage(self._times.usage(place.page_use) for place in group.places)
        return SequenceUsage(
            pages.kv_page_s,
            pages.adapter_page_s,
            pages.num_kv_pages,
            pages.num_adapter_pages,
            root.num_computed_prompt_tokens,
            root.num_cached_prompt_tokens,
            group.num_generated,
            sum([place.num_recomputed_tokens for place in group.places]) + group.num_dropped,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if a beam runs without its search, or a search without its root."""
        for group in self._groups.values():
            running = [place for place in group.places if place.sequence_id in self._running.by_id]
            assert not running or group.root in running, "a search runs without its root"
            assert {*running} <= {*group.beams}, "a place without a beam runs"
            assert group in self.joining or len(running) <= 1 or len(running) == len(group.live)
            num_places = sum(place.num_places for place in running)
            assert not running or num_places == max(len(running), self._num_places(group)), "places are miscounted"
        for sequence in self._running.by_id.values():
            assert sequence.beams is None or sequence.beams.root.sequence_id in self._groups

    def _fork(self, place: GrowingSequence, parent: GrowingSequence) -> None:
        """The place gets a beam that goes on where the parent's is, on the same pages."""
        prefixes, running = self._memory.prefixes, self._running
        if place.sequence_id not in running.by_id:
            prefixes.acquire(parent.held_pages)
            place.fork(parent)
            place.num_at_start = parent.num_computed
            self.enter(place, self._num_adapter_pages(parent))
            return
        first = 0
        if not (place.num_gone or parent.num_gone):
            first = min(place.num_prompt_tokens // self._block_size, len(place.pages), len(parent.pages))
            if place.pages[:first] != parent.pages[:first]:  # they have computed the prompt apart
                first = 0
        old, new = place.held_pages[first:], parent.held_pages[first:]
        prefixes.acquire(new)
        prefixes.release(old)
        running.reserve.remove(place)
        place.fork(parent)
        running.reserve.add(place)
        if len(new) > len(old):
            self._times.grow(place.page_use, len(new) - len(old))
        elif len(old) > len(new):
            self._times.shrink(place.page_use, len(old) - len(new))

    def _num_adapter_pages(self, sequence: GrowingSequence) -> int:
        digest = sequence.adapter_digest
        return 0 if digest is None else len(self._memory.adapters.residence(digest).pages)

    def _num_places(self, group: BeamGroup) -> int:
        """That the search takes: more than there are would never be free."""
        return min(group.rules.width, self._most_places)

    def _set_places(self, group: BeamGroup) -> None:
        num_others = sum(place.sequence_id in self._running.by_id for place in group.places[1:])
        self._running.set_places(group.root, max(1, self._num_places(group) - num_others))
