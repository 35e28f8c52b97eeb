"""The grammar of a request's answer, from the fields in which OpenAI, vLLM and SGLang ask for a form."""

from __future__ import annotations

from typing import Any, Final, Literal

from ..grammars.lark_pieces import SPACES
from ..grammars.wanted_grammar import WantedGrammar
from ..openai_api.errors import ApiError, invalid_value, unsupported
from ..openai_api.request_schema import GenerationFields

_Form = Literal["json", "regex", "choice", "grammar", "structural_tag"]
_FORMS: Final[tuple[_Form, ...]] = ("json", "regex", "choice", "grammar", "structural_tag")
# Fields of older servers -> what `structured_outputs` calls them.
_ALIASES: Final[dict[str, _Form]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_ANY_OBJECT: Final = {"type": "object"}


def request_grammar(request: GenerationFields) -> WantedGrammar | None:
    """The form that the answer must have; None: any. Raises a 400 for fields that contradict each other."""
    wanted = [*_of_openai(request), *_of_vllm(request)]
    wanted += [
        (name, form, getattr(request, name)) for name, form in _ALIASES.items() if getattr(request, name) is not None
    ]
    if not wanted:
        return None
    (param, form, value), *others = wanted
    if others:
        raise invalid_value(others[0][0], f"{param} says already what form the answer has: send one of them.")
    if request.use_beam_search:
        raise unsupported(param, "beams are ranked by the model's own probabilities: leave it out.")
    return WantedGrammar(param, form, value, _spaces(request))


def _of_openai(request: GenerationFields) -> list[tuple[str, _Form, Any]]:
    given = request.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [("response_format", "json", _ANY_OBJECT)]
    if given.type == "structural_tag":
        return [("response_format", "structural_tag", given)]
    if given.json_schema is None:
        message = "Missing required parameter: 'response_format.json_schema'."
        raise ApiError(400, message, param="response_format.json_schema", code="missing_required_parameter")
    return [("response_format.json_schema.schema", "json", given.json_schema.schema)]


def _of_vllm(request: GenerationFields) -> list[tuple[str, _Form, Any]]:
    given = request.structured_outputs
    if given is None:
        return []
    found = [(f"structured_outputs.{form}", form, getattr(given, form)) for form in _FORMS]
    wanted: list[tuple[str, _Form, Any]] = [one for one in found if one[2] is not None]
    if given.json_object:
        wanted.append(("structured_outputs.json_object", "json", _ANY_OBJECT))
    return wanted


def _spaces(request: GenerationFields) -> str | None:
    """White space in JSON: a regular expression."""
    given = request.structured_outputs
    if given is not None and given.disable_additional_properties:
        advice = "say 'additionalProperties': false in the schema."
        raise unsupported("structured_outputs.disable_additional_properties", advice)
    patterns = {
        "guided_whitespace_pattern": request.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": None if given is None else given.whitespace_pattern,
        "structured_outputs.disable_any_whitespace": "" if given is not None and given.disable_any_whitespace else None,
    }
    wanted = [(param, pattern) for param, pattern in patterns.items() if pattern is not None]
    if len(wanted) > 1:
        raise invalid_value(wanted[1][0], f"{wanted[0][0]} is given, too: send one of them.")
    return (wanted[0][1] or None) if wanted else SPACES
