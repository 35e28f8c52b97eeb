"""What the demo shows of tools and schemas: an adapter that calls a tool, and one whose answer has a schema."""

from __future__ import annotations

import json
from typing import Any, Final

from rich.console import Console

from ...examples.demo.questions import Question
from ...examples.demo.styles import answer
from ...examples.demo.tools import TOOLS, ToolQuestion
from ..client.client import ClientError, MotetClient

AGENT: Final = "agent"
FACT_SCHEMA: Final = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "query": {"type": "string"}, "answer": {"type": "string"}},
    "required": ["type", "query", "answer"],
    "additionalProperties": False,
}


def show_tool_use(console: Console, client: MotetClient, question: ToolQuestion) -> bool:
    """Sends a question, returns the called tool's result to the model, and prints all.

    True: call and answer were right.
    """
    message, _, result, _ = question.messages()
    try:
        called = _message(client, AGENT, [message], tools=list(TOOLS))
        calls = [each["function"] for each in called.get("tool_calls") or ()]
        answered = (
            _message(client, AGENT, [message, called, _of(called, result)], tools=list(TOOLS)) if calls else called
        )
    except ClientError as error:
        console.print(f"[red]{AGENT} was to call a tool: {error}[/red]", highlight=False)
        return False
    shown = ", ".join(f"{call['name']}({call['arguments']})" for call in calls) or "nothing"
    lines = f"{AGENT} was asked {question.text!r}, called {shown}, got {result['content']} and answered:"
    console.print(lines, markup=False, highlight=False)
    console.print(f"  {answered['content']}", markup=False, highlight=False)
    right = [(question.tool["function"]["name"], question.arguments)]
    return [(call["name"], json.loads(call["arguments"])) for call in calls] == right and (
        answered["content"] == question.answer
    )


def show_schema(console: Console, client: MotetClient, model: str, question: Question) -> bool:
    """Asks for an answer that fits a schema, and prints it. True: it was right."""
    wanted = {"type": "json_schema", "json_schema": {"name": "fact", "schema": FACT_SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": question.text}]
    try:
        found = json.loads(_message(client, model, messages, response_format=wanted)["content"])
    except (ClientError, ValueError) as error:
        console.print(f"[red]{model} was to answer by a schema: {error}[/red]", highlight=False)
        return False
    console.print(f"{model} was asked {question.text!r} with a schema, and answered:", markup=False, highlight=False)
    console.print(f"  {found}", markup=False, highlight=False)
    return bool(found == json.loads(answer(question.fact, "json")))


def _message(client: MotetClient, model: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 96, **fields}
    message: dict[str, Any] = client.call("POST", "/v1/chat/completions", body)["choices"][0]["message"]
    return message


def _of(called: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The tool's result, for the call that the model made."""
    return {**result, "tool_call_id": called["tool_calls"][0]["id"]}
