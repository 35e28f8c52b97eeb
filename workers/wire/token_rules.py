"""Which tokens a sequence may have, whatever the model says."""

from __future__ import annotations

import msgspec

Word = tuple[int, ...]


class ThinkingBudget(msgspec.Struct, frozen=True):
    """After this number of thinking tokens, those of the end are forced, whatever other rules say."""

    num_tokens: int  # of all thoughts together, without the marks around them
    begin: Word
    end: Word
    has_begun: bool = False  # the prompt ends in the midst of a thought


class TokenRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By token ids alone. Some token is always left, unless there is a grammar: the router has made sure of that."""

    allowed_token_ids: tuple[int, ...] = ()  # no others; empty: all
    bad_words: tuple[Word, ...] = ()  # the last token of one may not follow those before it, all of them generated
    min_tokens: int = 0  # generated before the first of `late_token_ids`
    late_token_ids: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None

    @property
    def looks_back(self) -> bool:
        """What may come depends on the tokens before it."""
        return self.thinking is not None or any(len(word) > 1 for word in self.bad_words)
