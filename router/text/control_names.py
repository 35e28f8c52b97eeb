"""Which added tokens of a vocabulary are control tokens: what texts in messages must not write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import TemplateError

from .added_tokens import AddedTokens

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


def control_names(tokens: AddedTokens, template: str, apply: Apply) -> ControlNames:
    """All special tokens, and of the others those that the template writes. `template`: its source."""
    names = {name for name in tokens.names if not name.isspace()}
    special = frozenset(names & tokens.special)
    others = names - special
    ends = {name for text in _rendered(apply) for name in tokens.names_in(text.rpartition(_ANSWER)[2])}
    begins = {name for text in _rendered(apply, add_generation_prompt=True) for name in tokens.names_in(text)}
    literal = {name for name in others if name in template}
    return ControlNames(
        in_messages=special | (others & (ends | begins | literal)),
        in_answers=special | (others & ends),
    )


def _rendered(apply: Apply, **options: Any) -> Iterator[str]:
    """What the template makes of chats that hold no control tokens; nothing of chats that it refuses."""
    for roles in _CHATS:
        chat = [{"role": role, "content": _ANSWER if role == "assistant" else _OTHER} for role in roles]
        try:
            yield apply(chat, **options)
        except TEMPLATE_ERRORS:
            continue
