"""How a model writes its answers: which part of the text is thought, which is a tool call, and which is content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from ...adapters.format.own_tokenizer import template_digest
from .answer_formats import FORMATS, KNOWN_TEMPLATES, MARKERS, Spec
from .growing_calls import CallHeads, call_heads
from .template_forms import REASONING_NAMES

BY_TEMPLATE: Final = "auto"
NO_FORMAT: Final = "none"
NUM_ID_CHARS: Final = 24  # of a call
_CALLS: Final = "tool_calls"
_NUM_DIGEST_CHARS: Final = 16
_PROBE_CHARS: Final = 4096


@dataclass(frozen=True, eq=False)
class AnswerFormat:
    """A response template of transformers. `name`: of the table's, or whose it is."""

    name: str
    spec: Mapping[str, Any]
    template: Any  # transformers' `ResponseTemplate`
    family: str | None = None  # the format of the table in which the model writes; None: it is not known

    @cached_property
    def has_calls(self) -> bool:
        return _CALLS in self.template.fields

    @cached_property
    def has_reasoning(self) -> bool:
        return any(name in REASONING_NAMES for name in self.template.fields)

    @cached_property
    def without_calls(self) -> AnswerFormat:
        """For answers in which no tool may be called: what looks like a call is text."""
        return _without(self, _CALLS)

    @cached_property
    def call_heads(self) -> CallHeads | None:
        """How calls begin, if they can be shown while they are generated; None: they are shown once complete."""
        return call_heads(self.template.fields[_CALLS]) if self.has_calls else None

    @property
    def num_id_chars(self) -> int:
        """Characters of a call's id. Mistral's chat templates require nine."""
        return 9 if self.family in ("mistral", "mistral-args") else NUM_ID_CHARS

    @cached_property
    def thought_marks(self) -> tuple[str, str] | None:
        """The texts that begin and end thoughts; None: there are none, or they are patterns."""
        for field in self.template.fields.values():
            if field.name in REASONING_NAMES and field.open_literals and field.close_literals:
                return field.open_literals[0], field.close_literals[0]
        return None

    @cached_property
    def has_marked_content(self) -> bool:
        """Whether text is content only behind a mark."""
        return self.template.implicit is None

    def names(self, token: str) -> bool:
        """Whether the template has this text, also within a pattern."""
        return any(token in text for text in self._texts)

    @cached_property
    def _texts(self) -> list[str]:
        return [text.replace("\\", "") for text in _strings(self.spec["fields"])]


def answer_format(chosen: str, tokenizer: Any, vocabulary: frozenset[str]) -> AnswerFormat | None:
    """The format that an operator has chosen, else the model's own, else the one that its chat template is known for.

    None: nothing is known of it, or an operator has turned it off. `vocabulary`: the added tokens. Blocking; raises
    ValueError for one that cannot be read.
    """
    source = tokenizer.chat_template or ""
    if isinstance(source, dict):
        source = "\n".join(source.values())
    if chosen == NO_FORMAT or not source:
        return None
    if chosen in FORMATS:
        return named_format(chosen)
    if chosen != BY_TEMPLATE:
        return replace(_of_file(Path(chosen)), family=known_format(source))
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return replace(_loaded("the model's own", own), family=known_format(source))
    name = known_format(source)
    if name is None:
        return None
    found = named_format(name)
    think = found.spec["fields"].get("reasoning", {}).get("open", "")
    return found if think in source or think in vocabulary else _without(found, "reasoning")


def named_format(name: str) -> AnswerFormat:
    return replace(_loaded(name, FORMATS[name]), family=name)


def known_format(source: str) -> str | None:
    """The name of the format that a chat template has, by its digest, else by the markers in it."""
    if (name := KNOWN_TEMPLATES.get(template_digest(source)[:_NUM_DIGEST_CHARS])) is not None:
        return name
    return next((name for name, texts in MARKERS if all(text in source for text in texts)), None)


def _of_file(path: Path) -> AnswerFormat:
    if not path.is_file():
        known = ", ".join((BY_TEMPLATE, NO_FORMAT, *FORMATS))
        raise ValueError(f"response-template: {str(path)!r} is neither a file nor one of {known}")
    try:
        spec = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"response-template: {path} is not valid JSON ({error})") from error
    return _loaded(str(path), spec)


def _loaded(name: str, spec: Spec) -> AnswerFormat:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        template = load_response_template(spec)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"response-template: {name} is not a response template of transformers ({error})") from error
    for field in template.fields.values():
        if field.content == "xml-inline":
            _check_tag_pattern(field.content_args.get("tag_pattern"), name)
        for pattern in (field.open_re, field.close_re):
            match = None if pattern is None else pattern.search("x" * _PROBE_CHARS, partial=True)
            if match is not None and match.partial and match.start() < _PROBE_CHARS:
                raise ValueError(
                    f"response-template: the pattern {pattern.pattern!r} of {field.name} in {name} matches only when "
                    "all of the answer has come, which cannot be streamed: choose one without it"
                )
    return AnswerFormat(name, spec, template)


def _check_tag_pattern(pattern: object, name: str) -> None:
    """Raises ValueError."""
    try:
        groups = re.compile(str(pattern)).groupindex if pattern is not None else {}
    except re.error as error:
        raise ValueError(
            f"response-template: the tag_pattern {pattern!r} in {name} is not a valid pattern ({error})"
        ) from error
    if not {"key", "value"} <= groups.keys():
        raise ValueError(f"response-template: the tag_pattern {pattern!r} in {name} has no groups 'key' and 'value'")


def _without(found: AnswerFormat, field: str) -> AnswerFormat:
    fields = {name: spec for name, spec in found.spec["fields"].items() if name != field}
    return replace(_loaded(found.name, {**found.spec, "fields": fields}), family=found.family) if fields else found


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value of JSON but keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
