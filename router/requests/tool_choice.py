"""Which tools a model may call in its answer, and how its text is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from ..openai_api.chat_messages import AllowedToolsChoice, FunctionDefinition, NamedFunction, NamedTool
from ..openai_api.errors import invalid_value, unsupported
from ..openai_api.request_schema import ChatRequest
from ..text.answer_format import AnswerFormat
from ..text.call_parsing import KnownTools
from ..text.response_reader import Reading, ResponseReader
from ..text.text import MAX_CHARS_ON_LOOP

Mode = Literal["none", "auto", "required"]


def check_tools(request: ChatRequest) -> None:
    """Raises a 400 for a choice among tools that the request does not have, or that is not supported."""
    mode, names = _choice(request)
    field = _field_of_choice(request)
    known = {function.name for function in _functions(request)}
    if mode == "required" or (names is not None and request.function_call is not None):
        what = "only 'auto', 'none' and allowed tools of mode 'auto' are; none is called by force yet."
        raise unsupported(field, what)
    if names is None:
        return
    for name in names:
        if name not in known:
            raise invalid_value(field, f"it names {name!r}, and there is no such tool in the request.")


async def answer_reader(request: ChatRequest, answers: AnswerFormat | None, prompt: str) -> ResponseReader | None:
    """What reads the answers' text. None: it is shown as it is.

    `answers`: the format of the model's; None: it is not known. `prompt`: what the chat template made of the messages.
    Raises a 400 for tools if it is not known how the model calls them.
    """
    mode, names = _choice(request)
    functions = [one for one in _functions(request) if names is None or one.name in names]
    if mode == "none" or not functions:
        if answers is None or not answers.has_reasoning:
            return None
        answers, functions = answers.without_calls, []
    elif answers is None or not answers.has_calls:
        raise unsupported(
            "functions" if request.functions else "tools",
            "it is not known in which form this model writes tool calls. Send tool_choice 'none', or have its operator "
            "set response-template.",
        )
    reading = Reading(
        answers,
        KnownTools({one.name: _properties(one) for one in functions}),
        with_reasoning=request.include_reasoning is not False,
        max_calls=1 if request.parallel_tool_calls is False or request.functions else None,
    )
    if len(prompt) <= MAX_CHARS_ON_LOOP:
        return ResponseReader(reading, prompt)
    return await asyncio.to_thread(ResponseReader, reading, prompt)


def is_old(request: ChatRequest) -> bool:
    """Whether calls are answered as `function_call`."""
    return bool(request.functions) and not request.tools


def _functions(request: ChatRequest) -> Sequence[FunctionDefinition]:
    return [tool.function for tool in request.tools or ()] or request.functions or []


def _field_of_choice(request: ChatRequest) -> str:
    return "tool_choice" if request.tool_choice is not None else "function_call"


def _choice(request: ChatRequest) -> tuple[Mode, list[str] | None]:
    """Whether tools may or must be called, and the names of those that may be; None: all."""
    choice = request.tool_choice if request.tool_choice is not None else request.function_call
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        return choice, None
    if isinstance(choice, NamedTool):
        return "required", [choice.function.name]
    if isinstance(choice, NamedFunction):
        return "required", [choice.name]
    assert isinstance(choice, AllowedToolsChoice)
    return choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]


def _properties(function: FunctionDefinition) -> dict[str, object]:
    found = (function.parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}
