"""The tools that a model may call in its answer, and the reader of its text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec.structs import replace

from ..grammars.call_grammar import CALL_TEXTS, CallText, WantedCalls
from ..grammars.lark_pieces import SPACES
from ..grammars.response_format import ResponseFormat, StructuredOutputs, WantedGrammar
from ..http.errors import ApiError, invalid_value, unsupported
from ..text.answer_format import AnswerFormat
from ..text.call_parsing import KnownTools
from ..text.response_reader import Reading, ResponseReader
from ..text.text import MAX_CHARS_ON_LOOP
from .chat_fields import needed
from .request_schema import (
    AllowedToolsChoice,
    ChatRequest,
    FunctionDefinition,
    GenerationFields,
    NamedFunction,
    NamedTool,
    TranslatedChat,
)

# The grammar of a request's answer, from the fields in which OpenAI, vLLM and SGLang ask for a form.

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
    forms: list[tuple[str, _Form, Any]] = []
    if request.response_format is not None:
        forms += _of_openai(request.response_format)
    if request.structured_outputs is not None:
        forms += _of_vllm(request.structured_outputs)
    forms += [
        (name, form, getattr(request, name)) for name, form in _ALIASES.items() if getattr(request, name) is not None
    ]
    if not forms:
        return None
    (param, form, value), *other_forms = forms
    if other_forms:
        raise invalid_value(other_forms[0][0], f"{param} says already what form the answer has: send one of them.")
    if request.use_beam_search:
        raise unsupported(param, "beams are ranked by the model's own probabilities: leave it out.")
    return WantedGrammar(param, form, value, _spaces(request))


def _of_openai(response_format: ResponseFormat) -> list[tuple[str, _Form, Any]]:
    if response_format.type == "text":
        return []
    if response_format.type == "json_object":
        return [("response_format", "json", _ANY_OBJECT)]
    if response_format.type == "structural_tag":
        return [("response_format", "structural_tag", response_format)]
    if response_format.json_schema is None:
        message = "Missing required parameter: 'response_format.json_schema'."
        raise ApiError(400, message, param="response_format.json_schema", code="missing_required_parameter")
    return [("response_format.json_schema.schema", "json", response_format.json_schema.schema)]


def _of_vllm(outputs: StructuredOutputs) -> list[tuple[str, _Form, Any]]:
    candidates = [(f"structured_outputs.{form}", form, getattr(outputs, form)) for form in _FORMS]
    forms: list[tuple[str, _Form, Any]] = [candidate for candidate in candidates if candidate[2] is not None]
    if outputs.json_object:
        forms.append(("structured_outputs.json_object", "json", _ANY_OBJECT))
    return forms


def _spaces(request: GenerationFields) -> str | None:
    """White space in JSON: a regular expression."""
    outputs = request.structured_outputs
    if outputs is not None and outputs.disable_additional_properties:
        advice = "say 'additionalProperties': false in the schema."
        raise unsupported("structured_outputs.disable_additional_properties", advice)
    patterns = {
        "guided_whitespace_pattern": request.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": None if outputs is None else outputs.whitespace_pattern,
        "structured_outputs.disable_any_whitespace": ""
        if outputs is not None and outputs.disable_any_whitespace
        else None,
    }
    choices = [(param, pattern) for param, pattern in patterns.items() if pattern is not None]
    if len(choices) > 1:
        raise invalid_value(choices[1][0], f"{choices[0][0]} is given, too: send one of them.")
    return (choices[0][1] or None) if choices else SPACES


_NO_CALLS: Final = CallText("")
Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class ToolChoice:
    """Which of a request's tools its answer may or must call."""

    mode: Mode
    functions: Sequence[FunctionDefinition] = ()  # that may be called
    param: str = "tool_choice"  # the field that chooses
    is_one: bool = False  # an answer has no more than one call
    is_old: bool = False  # the answer shows a call as `function_call`, the older field


NO_TOOLS: Final = ToolChoice("auto")


def tool_choice(request: ChatRequest) -> ToolChoice:
    """Raises a 400 for a choice among tools that the request does not have."""
    choice = request.tool_choice if request.tool_choice is not None else request.function_call
    if choice is None and not request.tools and not request.functions:
        return NO_TOOLS
    for position, tool in enumerate(request.tools or ()):
        if tool.type == "function":
            needed(tool.function, f"tools[{position}].function")
    functions = [tool.function for tool in request.tools or () if tool.type == "function" and tool.function is not None]
    functions = functions or request.functions or []
    mode, names = _chosen(choice)
    param = "tool_choice" if request.tool_choice is not None else "function_call"
    if mode == "required" and not functions:
        raise invalid_value(param, "a tool must be called, and the request has none, or all are left out.")
    tool_names = {function.name for function in functions}
    for name in names or ():
        if name not in tool_names:
            message = f"it names {name!r}, and the request has no such tool, or it is left out."
            raise invalid_value(param, message)
    is_old = bool(request.functions) and not request.tools
    return ToolChoice(
        mode,
        [function for function in functions if names is None or function.name in names],
        param,
        is_one=request.parallel_tool_calls is False or is_old or isinstance(request.tool_choice, NamedTool),
        is_old=is_old,
    )


def _chosen(
    choice: Mode | NamedTool | NamedFunction | AllowedToolsChoice | None,
) -> tuple[Mode, list[str] | None]:
    """Whether tools may or must be called, and the names of those that may be; None: all."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        return choice, None
    if isinstance(choice, NamedTool):
        return "required", [choice.function.name]
    if isinstance(choice, NamedFunction):
        return "required", [choice.name]
    return choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]


async def answer_reader(
    request: ChatRequest, choice: ToolChoice, answers: AnswerFormat | None, prompt: str
) -> ResponseReader | None:
    """The reader of the answers' text. None: the text is shown unchanged.

    `answers`: the format of the model's; None: it is not known. `prompt`: what the chat template made of the messages.
    Raises a 400 for tools if it is not known how the model calls them.
    """
    functions = choice.functions
    if choice.mode == "none" or not functions:
        if answers is None or not answers.has_reasoning:
            return None
        answers, functions = answers.without_calls, ()
    elif answers is None or not answers.has_calls:
        raise unsupported(
            "functions" if request.functions else "tools",
            "it is not known in which form this model writes tool calls. Send tool_choice 'none', or have its operator "
            "set response-template.",
        )
    reading = Reading(
        answers,
        KnownTools({function.name: _properties(function) for function in functions}),
        with_reasoning=request.include_reasoning is not False,
        max_calls=1 if choice.is_one else None,
    )
    if len(prompt) <= MAX_CHARS_ON_LOOP:
        return ResponseReader(reading, prompt)
    return await asyncio.to_thread(ResponseReader, reading, prompt)


def answer_grammar(request: ChatRequest, choice: ToolChoice, reader: ResponseReader | None) -> WantedGrammar | None:
    """The form that the answer must have, by the request's own form and by calls that must fit schemas. None: any.
    Raises a 400 for what a grammar cannot express.
    """
    grammar = request_grammar(request)
    if reader is None:
        return grammar
    answers = reader.reading.format
    if answers.has_calls:
        grammar = _with_calls(request, choice, grammar, answers)
    if grammar is None:
        return None
    texts = CALL_TEXTS.get(answers.family or "", _NO_CALLS)
    if answers.has_marked_content:
        if not texts.content:
            raise unsupported(grammar.param, "it is not with this model's form of answers; leave it out.")
        grammar = replace(grammar, opening=texts.content)
    if not answers.has_reasoning or (reader.has_reasoned and not reader.is_reasoning):
        return grammar
    marks = answers.thought_marks
    if marks is None:
        raise unsupported(
            grammar.param, "it is not where the marks of the model's thoughts are patterns; leave it out."
        )
    return replace(grammar, thought=("" if reader.is_reasoning else marks[0], marks[1], texts.behind_thoughts))


def _with_calls(
    request: ChatRequest, choice: ToolChoice, grammar: WantedGrammar | None, answers: AnswerFormat
) -> WantedGrammar | None:
    """With the calls, where they must be made, must fit a schema, or may stand in the place of another form."""
    functions, must_call = choice.functions, choice.mode == "required"
    text = CALL_TEXTS.get(answers.family or "")
    inputs = _inputs(request, choice, text)
    is_strict = any(function.strict or function.name in inputs for function in functions)
    if not (must_call or is_strict or grammar is not None):
        return None
    tools = "functions" if choice.is_old else "tools"
    field = choice.param if must_call else tools if grammar is None else grammar.param
    if request.use_beam_search:
        raise unsupported(field, "beams are ranked by the model's own probabilities: leave it out.")
    if text is None:
        problem = (
            "a form of its answers cannot be demanded together with tools" if grammar is not None else "no call can be"
        )
        raise unsupported(
            field, f"of this model {problem} demanded: its form of calls has no grammar here; leave it out."
        )
    calls = WantedCalls(
        text,
        [(declaration.name, _schema(declaration, is_needed=must_call)) for declaration in functions],
        must_call=must_call,
        is_one=choice.is_one,
        inputs={
            name: form for name, form in inputs.items() if any(declaration.name == name for declaration in functions)
        },
    )
    if grammar is None or must_call:
        grammar = WantedGrammar(tools, "any", None)
    return replace(grammar, calls=calls)


def _inputs(
    request: ChatRequest, choice: ToolChoice, text: CallText | None
) -> dict[str, tuple[Literal["lark", "regex"], str]]:
    """The grammars of custom tools' inputs, as far as answers can be held to them: see `formats_not_held`."""
    if not isinstance(request, TranslatedChat) or text is None or request.use_beam_search:
        return {}
    if not text.trigger and choice.mode != "required":
        return {}
    return {
        name: (tool.syntax, tool.definition)
        for name, tool in request.custom_tools.items()
        if tool.syntax is not None and tool.definition is not None
    }


def formats_not_held(request: TranslatedChat, choice: ToolChoice, reader: ResponseReader | None) -> list[str]:
    """The field with grammars of inputs that answers need not have, as this model's calls begin with no mark."""
    if reader is None or not reader.reading.format.has_calls:
        return []
    has_any = any(tool.definition is not None for tool in request.custom_tools.values())
    inputs = _inputs(request, choice, CALL_TEXTS.get(reader.reading.format.family or ""))
    return ["tools[].format"] if has_any and not inputs else []


def _schema(function: FunctionDefinition, *, is_needed: bool) -> dict[str, Any]:
    """The schema of its arguments, as far as they must match it."""
    return function.parameters or {} if is_needed or function.strict else {"type": "object"}


def _properties(function: FunctionDefinition) -> dict[str, object]:
    properties = (function.parameters or {}).get("properties")
    return properties if isinstance(properties, dict) else {}
