"""The added tokens of a vocabulary, and where a text names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken, Tokenizer, models

_HALF_CHARACTERS: Final = re.compile("[\ud800-\udfff]")
_NO_CHARACTER: Final = "\uffff"


@dataclass(frozen=True)
class TokenSpan:
    """A token that a text names."""

    start: int  # in characters
    end: int
    name: str


class AddedTokens:
    """Finds added tokens where the tokenizer does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.by_id = {token_id: added[token_id] for token_id in sorted(added) if added[token_id].content}
        self.names = frozenset(token.content for token in self.by_id.values())
        self.special = frozenset(token.content for token in self.by_id.values() if token.special)
        # Others are found only where a text has their name, letter for letter.
        self.are_normalized = tokenizer.normalizer is not None and any(
            token.normalized for token in self.by_id.values()
        )
        self._splitter = _splitter_of(tokenizer, [*self.by_id.values()])
        self._names = {self._splitter.token_to_id(name): name for name in self.names}
        self._pattern = None  # quick, where it finds the same
        has_rules = any(token.single_word or token.content[0].isspace() for token in self.by_id.values())
        if not (self.are_normalized or has_rules or tokenizer.encode_special_tokens):
            self._pattern = re.compile(_longest_of([*self.names]) if self.names else "(?!)")

    def find(self, text: str) -> list[TokenSpan]:
        """The added tokens that the tokenizer makes of the text, as they come, maybe with spaces that they take along.

        The text may have halves of surrogate pairs.
        """
        if self._pattern is not None:
            return [TokenSpan(*match.span(), match[0]) for match in self._pattern.finditer(text)]
        # The batch call releases the GIL.
        [found] = self._splitter.encode_batch([_HALF_CHARACTERS.sub(_NO_CHARACTER, text)], add_special_tokens=False)
        parts = zip(found.ids, found.offsets, strict=True)
        return [TokenSpan(*offsets, self._names[token_id]) for token_id, offsets in parts if token_id in self._names]

    def names_in(self, text: str) -> list[str]:
        """The names of those, as they come."""
        return [span.name for span in self.find(text)]


def _splitter_of(tokenizer: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    """Finds the tokenizer's added tokens, and takes what is between them for one unknown word each."""
    splitter = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    if tokenizer.normalizer is not None:
        splitter.normalizer = tokenizer.normalizer
    splitter.encode_special_tokens = tokenizer.encode_special_tokens
    splitter.add_tokens(added)
    return splitter


def _longest_of(words: Sequence[str]) -> str:
    """A pattern for the longest of the words: a tree, as one alternative after the other would be slow."""
    rests: dict[str, list[str]] = {}
    for word in words:
        if word:
            rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + _longest_of(rest) for first, rest in rests.items()]
    if "" not in words and len(branches) == 1:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}" if branches else ""
