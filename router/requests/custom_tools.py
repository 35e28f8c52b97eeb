"""Custom tools of OpenAI's Responses API: tools whose input is a text, as functions with one argument."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from ..grammars.call_grammar import INPUT
from ..openai_api.response_schema import CustomTool


def custom_function(tool: CustomTool) -> dict[str, Any]:
    """The fields of the function that the model is shown, in the order in which templates print them.

    A grammar is shown behind the description, as it is the only description of the input that many have.
    """
    form, description = tool.format, tool.description or ""
    if form is not None and form.definition is not None:
        grammar = f"Its {INPUT} is of this {form.syntax} grammar:\n{form.definition}"
        description = f"{description}\n\n{grammar}" if description else grammar
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"name": tool.name, "description": description, "parameters": parameters}


def input_of(arguments: str) -> str:
    """The input in the arguments of a call; of one that was cut off what there is of it."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""
