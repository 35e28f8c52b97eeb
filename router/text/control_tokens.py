"""Encodes texts so that control tokens' names in them are plain text, except where a chat template wrote them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, models

# The added tokens of a vocabulary, and where a text names them.

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
        self._tokenizer = tokenizer
        self._pattern = None  # quick, where it finds the same
        has_rules = any(token.single_word or token.content[0].isspace() for token in self.by_id.values())
        if not (self.are_normalized or has_rules or tokenizer.encode_special_tokens):
            with suppress(RecursionError):  # a long name, or many that begin with each other
                self._pattern = re.compile(_longest_of([*self.names]) if self.names else "(?!)")

    def find(self, text: str) -> list[TokenSpan]:
        """The added tokens that the tokenizer makes of the text, as they come, maybe with spaces that they take along.

        The text may have halves of surrogate pairs.
        """
        if self._pattern is not None:
            return [TokenSpan(*match.span(), match[0]) for match in self._pattern.finditer(text)]
        splitter, names = self._splitter
        # The batch call releases the GIL.
        [encoding] = splitter.encode_batch([_HALF_CHARACTERS.sub(_NO_CHARACTER, text)], add_special_tokens=False)
        parts = zip(encoding.ids, encoding.offsets, strict=True)
        return [TokenSpan(*offsets, names[token_id]) for token_id, offsets in parts if token_id in names]

    @cached_property
    def _splitter(self) -> tuple[Tokenizer, dict[int | None, str]]:
        """Finds added tokens as the tokenizer does; and their names by its ids."""
        splitter = _splitter_of(self._tokenizer, [*self.by_id.values()])
        return splitter, {splitter.token_to_id(name): name for name in self.names}

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
    branches = [re.escape(first) + _longest_of(tails) for first, tails in rests.items()]
    if "" not in words and len(branches) == 1:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}" if branches else ""


# Which added tokens of a vocabulary are control tokens: what texts in messages must not write.

Apply = Callable[..., str]  # a tokenizer's `apply_chat_template` that makes a text
TEMPLATE_ERRORS: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
_ANSWER: Final = "Motet's answer"
_OTHER: Final = "Motet's question"
# Templates refuse some of these. What follows the second message ends it, and begins one of another role.
_CHATS: Final = (
    ("user", "assistant", "user"),
    ("user", "assistant", "system", "user"),
    ("user", "assistant", "tool", "user"),
)


@dataclass(frozen=True)
class ControlNames:
    """Names of control tokens."""

    in_messages: frozenset[str]
    # In what assistants have said. Answers show tokens that are not special, such as <think>, and are sent back with
    # them. So there only those are control tokens that end an answer or begin a message of another role.
    in_answers: frozenset[str]


class RenderedChats(NamedTuple):
    """What a template makes of chats that hold no control tokens, without those that it refuses."""

    closed: list[str]
    open: list[str]  # for an answer


def rendered_chats(apply: Apply) -> RenderedChats:
    return RenderedChats([*_rendered(apply)], [*_rendered(apply, add_generation_prompt=True)])


def control_names(
    tokens: AddedTokens, template: str, chats: RenderedChats, ends: frozenset[str] = frozenset()
) -> ControlNames:
    """All special tokens, and of the others those that the template writes, and `ends`. `template`: its source."""
    names = {name for name in tokens.names if not name.isspace()}
    special = frozenset(names & tokens.special)
    ordinary = names - special
    ends |= {name for text in chats.closed for name in tokens.names_in(text.rpartition(_ANSWER)[2])}
    begins = {name for text in chats.open for name in tokens.names_in(text)}
    literal = {name for name in ordinary if name in template}
    return ControlNames(
        in_messages=special | (ordinary & (ends | begins | literal)),
        in_answers=special | (ordinary & ends),
    )


def _rendered(apply: Apply, **options: Any) -> Iterator[str]:
    """What the template makes of chats that hold no control tokens; nothing of chats that it refuses."""
    for roles in _CHATS:
        chat = [{"role": role, "content": _ANSWER if role == "assistant" else _OTHER} for role in roles]
        try:
            yield apply(chat, **options)
        except TEMPLATE_ERRORS:
            continue


_MARK: Final = re.compile("[\ud800-\udfff]")
_FIRST_MARK: Final = 0xD800
_NUM_OF_FIRST_MARKS: Final = 1024  # the first mark is drawn from these, so that no client can guess its escape
# Aliases are of characters for private use, which no normalizer changes, and random, so that no client can guess one.
_FIRST_OF_ALIASES: Final = 0x100000
_NUM_OF_ALIASES: Final = 0xFFFE
_ALIAS_CHARS: Final = 8


class Marks:
    """Hides characters in one request's texts: each becomes a mark, a lone surrogate, which no JSON body can hold.

    A name whose first character is hidden is not a control token, even where a template adds text around it.
    """

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}
        self._first = _FIRST_MARK + secrets.randbelow(_NUM_OF_FIRST_MARKS)

    def of(self, char: str) -> str:
        """The mark for this character."""
        return self._marks.setdefault(char, chr(self._first + len(self._marks)))

    def unescaped(self, text: str) -> str:
        """The text with marks restored that a template wrote as escapes, as `str` of a list of texts does."""
        for mark in self._marks.values() if "\\ud" in text else ():
            text = text.replace(f"\\u{ord(mark):x}", mark)
        return text

    def restore(self, text: str) -> str:
        """The text with hidden characters restored."""
        for char, mark in self._marks.items():
            text = text.replace(mark, char)
        return text


class ControlTokens:
    """Encodes with a second tokenizer, which shares the model, and which knows control tokens by secret aliases."""

    def __init__(self, tokenizer: Tokenizer, added: AddedTokens, names: frozenset[str], num_model_ids: int) -> None:
        """`names`: those of the added tokens that are control tokens; none is only whitespace.

        `num_model_ids`: see the function of this name, which takes long.
        """
        self.added = added
        self.names = names
        self._firsts = frozenset(name.strip()[0] for name in names)
        edges = {char for name in names for char in (name.strip()[0], name.strip()[-1])}
        self._edges = frozenset(char for char in edges if not char.isalnum())
        if (num_chars := len(self._firsts | self._edges)) > _NUM_OF_FIRST_MARKS:
            raise ValueError(
                f"its control tokens begin and end with {num_chars} different characters: at most "
                f"{_NUM_OF_FIRST_MARKS} can be hidden where messages write them"
            )
        self._joined = "\0".join(names)
        self._aliases = {name: _new_alias() for name in names}
        self._encoder = without_added_tokens(tokenizer)
        in_model = {name for name in added.names if self._encoder.token_to_id(name) is not None}
        # The model itself may encode a name as its control token, unless a cut token separates the name's characters.
        self._cut = _new_alias() if in_model & names else ""
        # Fillers, so that aliases get ids above all of the model's, which keep their meaning.
        fillers = [_new_alias() for _ in range(num_model_ids - self._encoder.get_vocab_size())]
        self._encoder.add_tokens([AddedToken(alias, normalized=False) for alias in [*fillers, self._cut] if alias])
        self._encoder.add_tokens([_renamed(token, self._aliases) for token in added.by_id.values()])
        self._cut_id = self._encoder.token_to_id(self._cut) if self._cut else None
        self._ids = {
            self._encoder.token_to_id(self._aliases.get(token.content, token.content)): token_id
            for token_id, token in added.by_id.items()
        }

    def may_hold_names(self, text: str) -> bool:
        """A quick check whether `hide` may find a name in the text."""
        return self.added.are_normalized or any(char in text for char in self._firsts) or self.has_pieces(text)

    def has_pieces(self, text: str) -> bool:
        """Whether a control token may result where a template adds to the text, or removes a part of it."""
        return any(char in text for char in self._edges) or self._is_inside_of_a_name(text)

    def _is_inside_of_a_name(self, text: str) -> bool:
        """Whether the text may become a name where a template adds <> around it. Plain words are not checked."""
        core = text.strip()
        return bool(core) and not core.isidentifier() and core in self._joined and core not in self.added.names

    def hide(self, text: str, names: frozenset[str], marks: Marks) -> str:
        """The text with the first character of each of these tokens hidden."""
        while spans := [span for span in self.added.find(text) if span.name in names]:
            parts, end = [], 0
            for span in spans:
                first = span.end - len(text[span.start : span.end].lstrip())
                parts += [text[end:first], marks.of(text[first])]
                end = first + 1
            text = "".join([*parts, text[end:]])
        return text

    def hide_pieces(self, text: str, marks: Marks) -> str:
        """The text with every character hidden that may begin or end a control token."""
        parts, end = [], 0
        for span in self.added.find(text):
            parts += [self._without_edges(text[end : span.start], marks), text[span.start : span.end]]
            end = span.end
        text = "".join([*parts, self._without_edges(text[end:], marks)])
        if self._is_inside_of_a_name(text):
            first = len(text) - len(text.lstrip())
            text = f"{text[:first]}{marks.of(text[first])}{text[first + 1 :]}"
        return text

    def _without_edges(self, text: str, marks: Marks) -> str:
        for char in self._edges:
            if char in text:
                text = text.replace(char, marks.of(char))
        return text

    def written(self, text: str) -> list[TokenSpan]:
        """The control tokens in the text that are not hidden."""
        return [span for span in self.added.find(text) if span.name in self.names]

    def with_aliases(self, text: str, marks: Marks) -> str:
        """The text for `encode`: control tokens that are not hidden become aliases, hidden characters are restored."""
        parts, end = [], 0
        for span in self.written(text):
            parts += [self._cut_at_marks(text[end : span.start]), self._aliases[span.name]]
            end = span.end
        return marks.restore("".join([*parts, self._cut_at_marks(text[end:])]))

    def _cut_at_marks(self, text: str) -> str:
        return _MARK.sub(lambda mark: mark[0] + self._cut, text) if self._cut else text

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts with aliases."""
        encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [
            [self._ids.get(token_id, token_id) for token_id in encoding.ids if token_id != self._cut_id]
            for encoding in encodings
        ]

    def encode_as_text(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts, with all control tokens' names as plain text."""
        marks = Marks()
        hidden = [self.hide(text, self.names, marks) if self.may_hold_names(text) else text for text in texts]
        aliased = [self.with_aliases(text, marks) for text in hidden]
        return self.encode(aliased, add_special_tokens=add_special_tokens)


def num_model_ids(tokenizer: Tokenizer) -> int:
    """One more than the highest id of the tokenizer's model."""
    return max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1


def _new_alias() -> str:
    numbers = memoryview(secrets.token_bytes(2 * _ALIAS_CHARS)).cast("H")
    return "".join([chr(_FIRST_OF_ALIASES + number % _NUM_OF_ALIASES) for number in numbers])


def _renamed(token: AddedToken, aliases: dict[str, str]) -> AddedToken:
    return AddedToken(
        aliases.get(token.content, token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with the same model, which both share, and the same steps before and after it."""
    bare = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        bare.pre_tokenizer = tokenizer.pre_tokenizer
    if tokenizer.post_processor is not None:
        bare.post_processor = tokenizer.post_processor
    if tokenizer.decoder is not None:
        bare.decoder = tokenizer.decoder
    bare.encode_special_tokens = tokenizer.encode_special_tokens
    return bare


def with_added_tokens(tokenizer: Tokenizer, tokens: Mapping[int, AddedToken]) -> Tokenizer:
    """A tokenizer with these added tokens by id, beside the tokenizer's or in their place; both share the model.

    Raises ValueError, which names one, for a token that cannot have its id.
    """
    added = {**tokenizer.get_added_tokens_decoder(), **tokens}
    extended = without_added_tokens(tokenizer)
    extended.add_tokens([added[token_id] for token_id in sorted(added)])
    for token_id, token in sorted(added.items()):
        if (next_id := extended.token_to_id(token.content)) != token_id:
            raise ValueError(f"{token.content!r} cannot have the id {token_id}: in their order it has {next_id}")
    return extended
