"""A step that was launched on a GPU."""

from __future__ import annotations

from functools import cached_property

import torch

from ...kernels.joint_sampling import ChoicesUnderWay
from ..decoding.prompt_scoring import PoolingUnderWay, ScoresUnderWay
from ..decoding.token_choice import sampled
from ..plan import SampledToken
from ..wire.prompt_scores import PromptScores


class BegunStep:
    """Its tokens: on the device as soon as they are chosen, on the host after a wait."""

    def __init__(
        self,
        sample_ids: tuple[int, ...] = (),
        choices: ChoicesUnderWay | None = None,
        scores: ScoresUnderWay | None = None,
        pooling: PoolingUnderWay | None = None,
        late: frozenset[int] = frozenset(),
    ) -> None:
        """`sample_ids`: the sequences that get a token; `choices` is None if none does, the others likewise.

        `late`: sequences whose token is dropped.
        """
        self._sample_ids, self._choices, self._scores, self.late = sample_ids, choices, scores, late
        self._pooling = pooling

    @property
    def token_ids(self) -> torch.Tensor:
        """`[num_samples]` int64 on the device; negative where no token can be chosen."""
        assert self._choices is not None, "a step chooses no tokens, and another one should be fed with them"
        return self._choices.token_ids

    @cached_property
    def indices(self) -> dict[int, int]:
        """By sequence id, the index of its token in `token_ids`."""
        return {sequence_id: place for place, sequence_id in enumerate(self._sample_ids)}

    def settle(self) -> None:
        """Makes the tokens final, which waits for the step if one may still change."""
        if self._choices is not None and self._choices.may_change:
            self.tokens  # noqa: B018

    @cached_property
    def tokens(self) -> dict[int, SampledToken | None]:
        """By sequence id; waits for the step."""
        if self._choices is None:
            return {}
        tokens = zip(self._sample_ids, sampled(self._choices.read()), strict=True)
        return {sequence_id: token for sequence_id, token in tokens if sequence_id not in self.late}

    @cached_property
    def scores(self) -> dict[int, PromptScores | None]:
        """Of prompts, by sequence id; waits for the step."""
        return {} if self._scores is None else self._scores.read()

    @cached_property
    def pooled(self) -> dict[int, bytes | None]:
        """Sums of states, by sequence id; waits for the step."""
        return {} if self._pooling is None else self._pooling.read()
