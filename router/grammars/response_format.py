"""The format that a request asks for: the fields as the APIs have them, and as they go to llguidance's translator."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from .call_grammar import WantedCalls
from .lark_pieces import SPACES


class WantedGrammar(msgspec.Struct, frozen=True):
    """Travels to the process that translates it."""

    param: str  # the field that asks for it
    form: Literal["json", "regex", "choice", "grammar", "structural_tag", "any"]
    value: Any  # as the field has it
    spaces: str | None = SPACES  # between the tokens of JSON: a regular expression; None: there are none
    # Marks of what may come first, the first of them empty where it has begun, and what must stand behind both.
    thought: tuple[str, str, str] | None = None
    opening: str = ""  # of an answer that is not a call
    calls: WantedCalls | None = None  # that may or must be there, beside text or in its place


# Fields of requests for the format of answers: OpenAI's `response_format`, vLLM's `structured_outputs`.

# Fields of a request, of which at most one may be given.
FORM_FIELDS: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    "json_schema",
    "regex",
    "ebnf",
)
JsonSchema = dict[str, Any] | bool
Choices = Annotated[list[str], Meta(min_length=1)]


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    schema: JsonSchema
    name: str | None = None
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="Answers fit the schema either way.")] = None


class TagStructure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: JsonSchema | None = None  # None: any JSON


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`structures` with `triggers`, or `format`: of "structural_tag"."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the first six; the others are options of `json` and `json_object`."""

    json: Annotated[JsonSchema | str | None, Meta(description="A JSON schema, or its text.")] = None
    regex: Annotated[str | None, Meta(description="Of the whole answer.")] = None
    choice: Choices | None = None
    grammar: Annotated[str | None, Meta(description="GBNF, or Lark as llguidance has it.")] = None
    json_object: bool | None = None
    structural_tag: Annotated[str | None, Meta(description="The JSON of such a `response_format`.")] = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Annotated[str | None, Meta(description="A regular expression.")] = None
    disable_additional_properties: bool | None = None
    disable_fallback: Annotated[bool | None, Meta(description="There is no other backend.")] = None
