"""One beam search in a gang: its beams are sequences that share pages, and that get their tokens together."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..plan import SampledToken
from ..wire.beams import NEW_STATE, BeamRound, BeamRules, best_candidates, choose, forks
from ..wire.messages import SamplingParams, TokenLogprobs
from ..wire.sequence_usage import SequenceUsage
from .growing_sequence import GrowingSequence


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
        self.begun = beams[1:]  # tokens of the beams whose places are not there yet
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
            begun = self.begun[number - 1] if number <= len(self.begun) else []
            place = GrowingSequence(
                msgspec.structs.replace(root.request, sequence_id=sequence_id, usage=None),
                root.arrival + number,
                root.seed,
                prompt + begun,
                root.stop_ids,
                root.max_length,
                full_layers=root.full_layers,
                num_adapter_pages=root.num_adapter_pages,
            )
            place.beams, place.sampling, place.counter = self, root.sampling, root.counter
            place.num_counted = max(0, len(place.token_ids) - 1)
            self.places.append(place)
        self.begun = self.begun if len(self.places) <= len(self.begun) else []

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
        one = best_candidates(self.state.totals, logprobs, self.rules)
        choice = choose(self.state, one.candidates, self.rules, lambda _: False)
        chosen = [one.candidates[index] for index in choice.live]
        parents = [self.live[candidate.parent] for candidate in chosen]
        self.state, self.live = choice.state, forks(parents, max(len(self.places), len(chosen)))
        return one, [*zip(self.live, parents, [candidate.token_id for candidate in chosen], strict=True)]


def sampling_of(rules: BeamRules) -> SamplingParams:
    """With which a worker computes the rows that a round is chosen from."""
    return SamplingParams(max_tokens=rules.max_tokens, temperature=0.0, num_logprobs=rules.num_candidates)
