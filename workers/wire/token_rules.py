"""Which tokens a sequence may have, whatever the model says."""

from __future__ import annotations

import msgspec

Word = tuple[int, ...]


class TokenRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By token ids alone. Some token is always left: the router has made sure of that."""

    allowed_token_ids: tuple[int, ...] = ()  # no others; empty: all
    bad_words: tuple[Word, ...] = ()  # the last token of one may not follow those before it, all of them generated
    min_tokens: int = 0  # generated before the first of `late_token_ids`
    late_token_ids: tuple[int, ...] = ()

    @property
    def has_long_words(self) -> bool:
        """Some bad word has several tokens."""
        return any(len(word) > 1 for word in self.bad_words)
