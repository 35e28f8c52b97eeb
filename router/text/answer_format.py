"""How a model writes its answers: which part of the text is thought, which is a tool call, and which is content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from ...adapters.format.own_tokenizer import template_digest
from .chat_renderer import REASONING_NAMES
from .growing_calls import CallHeads, call_heads

# The forms in which families of models write thoughts and tool calls, as response templates of transformers.

Spec = dict[str, Any]

_CHATML: Final = "<|im_start|>assistant\n"
_LLAMA: Final = ["<|start_header_id|>assistant<|end_header_id|>\n\n", "<|header_start|>assistant<|header_end|>\n\n"]
_DEEPSEEK: Final = ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"]
_MISTRAL: Final = ["[/INST]", "[/TOOL_RESULTS]"]


def _spec(anchor: str | list[str], **fields: Spec) -> Spec:
    return {"start_anchor": anchor, "fields": fields}


def _calls(name: Any = "{name}", arguments: Any = "{content}", **field: Any) -> Spec:
    """The field of tool calls."""
    function = {"name": name, "arguments": arguments}
    return {"repeats": True, "content": "json", "transform": {"type": "function", "function": function}, **field}


def _call_list(arguments: Any = "{arguments}", **field: Any) -> Spec:
    """The field of tool calls that come in one list."""
    return {**_calls(arguments=arguments, **field), "repeats": False, "transform_each": True}


def _tags(pattern: str) -> Spec:
    """Arguments in tags. Their values are texts, of which the tool's schema says the type."""
    return {"tag_pattern": pattern, "value_parser": {"name": "text", "args": {"strip": False}}}


_THINK: Final[Spec] = {"open": "<think>", "close": "</think>"}
_CONTENT: Final[Spec] = {"close": "<|im_end|>"}

FORMATS: Final[Mapping[str, Spec]] = MappingProxyType(
    {
        "hermes": _spec(
            _CHATML,
            reasoning=_THINK,
            tool_calls=_calls("{content.name}", "{content.arguments}", open="<tool_call>", close="</tool_call>"),
            content=_CONTENT,
        ),
        "qwen-xml": _spec(
            _CHATML,
            reasoning=_THINK,
            tool_calls=_calls(
                open_pattern=r"<tool_call>\s*<function=(?P<name>[^\s<>]+)>",
                close="</tool_call>",
                content="xml-inline",
                content_args=_tags(r"<parameter=(?P<key>[^<>]+)>\n?(?P<value>.*?)\n?</parameter>"),
            ),
            content=_CONTENT,
        ),
        "glm": _spec(
            "<|assistant|>",
            reasoning=_THINK,
            tool_calls=_calls(
                open_pattern=r"<tool_call>\s*(?P<name>[^\s<>]+)(?=[\s<])",
                close="</tool_call>",
                content="xml-inline",
                content_args=_tags(
                    r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                ),
            ),
            content={"close": ["<|user|>", "<|observation|>"]},
        ),
        "llama-json": _spec(
            _LLAMA,
            tool_calls=_call_list(
                "{parameters}",
                open_pattern=r"(?:<\|python_tag\|>\s*)?(?=\{\s*\"(?:name|type)\"\s*:)",
                content_args={"separator": ";"},  # ours: several values come with it between them, and are a list
            ),
            content={"close": ["<|eot_id|>", "<|eom_id|>"]},
        ),
        "pythonic": _spec(
            _LLAMA,
            tool_calls=_call_list(
                open_pattern=r"(?:<\|python_(?:start|tag)\|>\s*)?(?=\[[A-Za-z_][\w.-]*\()",
                close="<|python_end|>",
                content="python-call-list",
            ),
            content={"close": ["<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"]},
        ),
        "lfm": _spec(
            _CHATML,
            reasoning=_THINK,
            tool_calls=_call_list(open="<|tool_call_start|>", close="<|tool_call_end|>", content="python-call-list"),
            content=_CONTENT,
        ),
        "mistral": _spec(
            _MISTRAL,
            reasoning={"open": "[THINK]", "close": "[/THINK]"},
            tool_calls=_call_list(open="[TOOL_CALLS]"),
            content={"close": "</s>"},
        ),
        "mistral-args": _spec(
            _MISTRAL,
            reasoning={"open": "[THINK]", "close": "[/THINK]"},
            tool_calls=_calls(
                open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]",
                close_pattern=r"(?=\[TOOL_CALLS\])",
            ),
            content={"close": "</s>"},
        ),
        "gemma": _spec(
            ["<|turn>model\n", "<tool_response|>"],
            reasoning={"open": "<|channel>thought\n", "close": "<channel|>"},
            tool_calls=_calls(
                open_pattern=r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
                close="<tool_call|>",
                content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            ),
            content={"close": ["<turn|>", "<|tool_response>"]},
        ),
        "gpt-oss": _spec(
            "<|start|>assistant",
            reasoning={"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True, "join": "\n"},
            tool_calls=_calls(
                open_pattern=(  # possessive: else a long run of spaces is shared out in all ways
                    r"(?:<\|channel\|>commentary\s++)?to=functions\.(?P<name>[\w.-]++)\s*+"
                    r"(?:<\|channel\|>commentary)?+\s*+(?:<\|constrain\|>)?+\s*+(?:json)?+<\|message\|>"
                ),
                close="<|call|>",
            ),
            content={
                "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
                "close": ["<|return|>", "<|end|>"],
                "repeats": True,
                "join": "\n",
            },
        ),
        "deepseek": _spec(
            _DEEPSEEK,
            reasoning=_THINK,
            tool_calls=_calls(
                open_pattern=r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<>]+)\s*```json\s",
                close_pattern=r"```\s*<｜tool▁call▁end｜>",
            ),
            content={"close": ["<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]},
        ),
        "deepseek-3.1": _spec(
            _DEEPSEEK,
            reasoning=_THINK,
            tool_calls=_calls(
                open_pattern=r"<｜tool▁call▁begin｜>(?P<name>[^\s<>]+)<｜tool▁sep｜>", close="<｜tool▁call▁end｜>"
            ),
            content={"close": ["<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]},
        ),
        "think": _spec([_CHATML, *_LLAMA, "<|assistant|>", *_DEEPSEEK], reasoning=_THINK, content={}),
    }
)

# SHA-256 of known chat templates (`template_digest`), by their first 16 digits.
KNOWN_TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "55b2f4a26ac9ee71": "hermes",  # qwen2_5
        "a55ee1b1660128b7": "hermes",  # qwen3
        "64f85b198065d0fb": "hermes",  # qwen3_instruct_2507
        "9d879ef91075acbf": "hermes",  # qwen3_vl
        "273d8e0e683b8850": "qwen-xml",  # qwen3_5_nothink
        "a4aee8afcf2e0711": "qwen-xml",  # qwen3_5_think
        "e84f32a23fdda276": "qwen-xml",  # qwen3_6
        "c3cf9e34abf4f9e3": "qwen-xml",  # qwen3_8
        "43a92aacc2e169bb": "qwen-xml",  # nemotron_3_nano
        "3b74d76d8b903752": "qwen-xml",  # nemotron_3_super
        "82753bef5cedc493": "qwen-xml",  # nemotron_3_ultra
        "58933db77d3099b4": "qwen-xml",  # nemotron_3_5_lightning
        "5504d163d879bfb6": "lfm",  # lfm2_v2
        "6d65c8804847ad74": "lfm",  # lfm2_2_5
        "c5b67247c9f736f6": "lfm",  # lfm2_2_5_v2
        "7822d3aa6f6eac57": "lfm",  # lfm2_2_5_vl
        "33204f1acb5bd000": "gemma",  # gemma4
        "55572b8d3c834204": "gemma",  # gemma4_v2
        "781d10940fbc44be": "gemma",  # gemma4_v3
        "2f1b4d75d067bae3": "gemma",  # gemma4_v4
        "603a42db292c2527": "gemma",  # gemma4_v5
        "44f815868bf02fa4": "glm",  # glm4moe
        "a4c9919cbbd4acdd": "gpt-oss",  # gptoss
        "93c0e9aa3629bbd7": "llama-json",  # llama3_1
        "d82792f95932f1c9": "llama-json",  # llama3_2
        "563b1ce7d61d50a9": "deepseek",  # deepseekv3
        "56a1447ad31926fd": "deepseek",  # deepseek_r1_distill
    }
)

# For others, the first line whose texts are all in the template's source.
MARKERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("gemma", ("<|tool_call>call:",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen-xml", ("<tool_call>", "<function=")),
    ("lfm", ("<|tool_call_start|>", "<|im_start|>")),
    ("hermes", ("<tool_call>", "<|im_start|>")),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek-3.1", ("<｜tool▁call▁begin｜>",)),
    ("pythonic", ("func_name1(", "assistant")),
    ("llama-json", ("<|start_header_id|>", '"parameters"')),
    ("think", ("<think>", "</think>")),
)


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

    @cached_property
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
    template = getattr(tokenizer, "response_template", None)
    if template is not None:
        return replace(_loaded("the model's own", template), family=known_format(source))
    name = known_format(source)
    if name is None:
        return None
    candidate = named_format(name)
    think = candidate.spec["fields"].get("reasoning", {}).get("open", "")
    return candidate if think in source or think in vocabulary else _without(candidate, "reasoning")


def named_format(name: str) -> AnswerFormat:
    return replace(_loaded(name, FORMATS[name]), family=name)


def known_format(source: str) -> str | None:
    """The name of the format that a chat template has, by its digest, else by the markers in it."""
    if (name := KNOWN_TEMPLATES.get(template_digest(source)[:_NUM_DIGEST_CHARS])) is not None:
        return name
    return next((name for name, texts in MARKERS if all(text in source for text in texts)), None)


def _of_file(path: Path) -> AnswerFormat:
    if not path.is_file():
        names = ", ".join((BY_TEMPLATE, NO_FORMAT, *FORMATS))
        raise ValueError(f"response-template: {str(path)!r} is neither a file nor one of {names}")
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


def _without(answers: AnswerFormat, field: str) -> AnswerFormat:
    fields = {name: spec for name, spec in answers.spec["fields"].items() if name != field}
    return (
        replace(_loaded(answers.name, {**answers.spec, "fields": fields}), family=answers.family) if fields else answers
    )


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value of JSON but keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)
