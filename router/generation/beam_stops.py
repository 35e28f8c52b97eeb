"""Stop strings of beams: which beam's last token completes one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..text.stop_strings import StopMatcher, StopStrings
from ..text.text import TextService
from .beam_search import Beam

_NUM_CONTEXT_TOKENS: Final = 16  # more than a detokenizer looks at


class BeamStops:
    """Remembers how far each beam of the last two rounds has come into a string, so that each token is examined once.

    To be called with the beams of one search, round by round, and with none that an earlier token has stopped.
    """

    def __init__(
        self, stop: StopStrings, text: TextService, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._automaton = stop.automaton if stop.strings else None
        self._text, self._skip_special_tokens = text, skip_special_tokens
        self._context = [*prompt_token_ids[-_NUM_CONTEXT_TOKENS:]]
        self._before: dict[tuple[int, ...], StopMatcher] = {}  # of the beams that are one token shorter
        self._now: dict[tuple[int, ...], StopMatcher] = {}
        self._length = 0  # tokens of the beams in `_now`

    def __call__(self, beam: Beam) -> bool:
        """Whether the beam's last token completes one of the strings."""
        if self._automaton is None:
            return False
        *earlier, last = beam.token_ids
        if len(beam.token_ids) > self._length:
            self._before, self._now = self._now, {}
            self._length = len(beam.token_ids)
        parent = self._before.get(beam.token_ids[:-1])
        matcher = StopMatcher(self._automaton) if parent is None else parent.copy()
        context = [*self._context, *earlier[-_NUM_CONTEXT_TOKENS:]][-_NUM_CONTEXT_TOKENS:]
        detokenizer = self._text.detokenizer(context, skip_special_tokens=self._skip_special_tokens)
        found = matcher.find(detokenizer.step(last))
        self._now[beam.token_ids] = matcher
        return found is not None
