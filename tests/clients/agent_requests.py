"""What coding agents send with each turn, cut to the least: the types and fields of their requests with texts of ours.

Recorded on 2026-11-28 from Claude Code 2.1.328, Codex 0.169.0, opencode 1.18.33, Cline 3.0.65 and Qwen Code 0.24.4, and
from what their APIs have besides in a history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import httpx

ASK: Final = "What does note.txt say?"
FOUND: Final = "The word is mango."
MORE: Final = "And in capitals?"
RULES: Final = "You help with code."
PLACE: Final = "You are in the folder /work."
_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "Of the file."}, "limit": {"type": "integer"}},
    "required": ["path"],
    "additionalProperties": False,
}
_ARGUMENTS: Final = '{"path": "note.txt"}'
PATCH: Final = r"""start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " name LF line+
name: /(.+)/
line: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"""


class AgentRequest(NamedTuple):
    client: str
    turn: str
    path: str
    body: dict[str, Any]


def _claude(turn: str, *messages: dict[str, Any], **more: Any) -> AgentRequest:
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "Read", "description": "Reads a file.", "input_schema": _PARAMETERS}
    later = {"name": "Later", "description": "Is not called.", "input_schema": {"type": "object", "properties": {}}}
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Today is Monday."}, {"type": "text", "text": ASK}]},
            {"role": "system", "content": [{"type": "text", "text": PLACE, **cached}]},
            *messages,
        ],
        "system": [{"type": "text", "text": RULES}, {"type": "text", "text": "Be brief.", **cached}],
        "tools": [tool, {**later, "defer_loading": True}],
        "metadata": {"user_id": '{"device_id": "1", "account_uuid": "", "session_id": "2"}'},
        "max_tokens": 64,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    return AgentRequest("Claude Code", turn, "/v1/messages?beta=true", {**body, **more})


def _codex(turn: str, *items: dict[str, Any], **more: Any) -> AgentRequest:
    def message(role: str, *texts: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}

    function = {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False}
    function["parameters"] = _PARAMETERS
    nested = {**function, "name": "spawn_agent"}
    patch = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    body = {
        "input": [
            message("developer", RULES),
            message("developer", "You have no skills.", "You may write files."),
            message("user", PLACE),
            message("user", ASK),
            *items,
        ],
        "tools": [
            function,
            {"type": "namespace", "name": "agents", "description": "Others.", "tools": [nested]},
            {"type": "custom", "name": "apply_patch", "description": "Changes files.", "format": patch},
            {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": _PARAMETERS},
            {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]},
            {"type": "image_generation", "output_format": "png"},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1",
        "text": {"verbosity": "low"},
        "client_metadata": {"session_id": "1", "x-codex-installation-id": "2"},
        "max_output_tokens": 64,
    }
    return AgentRequest("Codex", turn, "/v1/responses", {**body, **more})


def _chat(client: str, turn: str, *messages: dict[str, Any], **more: Any) -> AgentRequest:
    function = {"name": "read", "description": "Reads a file.", "parameters": _PARAMETERS}
    body = {
        "max_tokens": 64,
        "messages": [{"role": "system", "content": RULES}, *messages],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return AgentRequest(client, turn, "/v1/chat/completions", {**body, **more})


def _said(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def _parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


_PICTURE: Final = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
_USE: Final = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "note.txt"}}
_USED: Final = _said("assistant", [_USE])
_CALL: Final = {
    "type": "function_call",
    "status": "completed",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "exec_command",
    "arguments": _ARGUMENTS,
}
_OUTPUT: Final = {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": FOUND}
_SPOKEN: Final[dict[str, Any]] = {
    "type": "message",
    "status": "completed",
    "id": "msg_1",
    "role": "assistant",
    "content": [{"type": "output_text", "text": FOUND, "annotations": []}],
}
_ASKED: Final = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": MORE}]}
_CALLED: Final[dict[str, Any]] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "read", "arguments": _ARGUMENTS}}],
}


def _result(content: Any) -> dict[str, Any]:
    return _said("user", [{"tool_use_id": "toolu_1", "type": "tool_result", "content": content}])


def _chats_of(client: str, *asked: dict[str, Any], with_parts: bool = False, **more: Any) -> list[AgentRequest]:
    content: Any = _parts(FOUND) if with_parts else FOUND
    result = {"role": "tool", "tool_call_id": "call_1", "content": content}
    called = _CALLED if with_parts else {**_CALLED, "content": ""}
    last = _said("user", _parts(MORE) if with_parts else MORE)
    return [
        _chat(client, "first", *asked, **more),
        _chat(client, "result", *asked, called, result, **more),
        _chat(client, "second", *asked, called, result, _said("assistant", FOUND), last, **more),
    ]


def _with_item(turn: str, *items: dict[str, Any]) -> AgentRequest:
    return _codex(turn, *items, _SPOKEN, _ASKED)


REQUESTS: Final[list[AgentRequest]] = [
    _claude("first"),
    _claude("result", _USED, _result("1\tThe word is mango.\n")),
    _claude("second", _USED, _result(FOUND), _said("assistant", _parts(FOUND)), _said("user", _parts(MORE))),
    _claude("note behind a result", _USED, _result(FOUND), _said("system", "The file has changed.")),
    _claude("other tools", _USED, _result(FOUND), _said("system", [{"type": "tool_addition", "tools": []}])),
    _claude("picture in a result", _USED, _result([*_parts(FOUND), _PICTURE])),
    _claude("tool found", _USED, _result([{"type": "tool_reference", "tool_name": "Later"}])),
    _claude("budget of thoughts", thinking={"type": "enabled", "budget_tokens": 1024}),
    _claude(
        "thoughts of another server",
        _said("assistant", [{"type": "redacted_thinking", "data": "AA=="}, *_parts(FOUND)]),
        _said("user", MORE),
    ),
    _claude(
        "search of another server",
        _said(
            "assistant",
            [
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "mango"}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": {"type": "error"}},
                *_parts(FOUND),
            ],
        ),
        _said("user", MORE),
        tools=[
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"name": "Read", "description": "Reads a file.", "input_schema": _PARAMETERS},
        ],
    ),
    _codex("first"),
    _codex("result", _CALL, _OUTPUT),
    _codex("second", _CALL, _OUTPUT, _SPOKEN, _ASKED),
    _codex(
        "patch",
        {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "call_1"}
        | {"name": "apply_patch", "input": "*** Begin Patch\n*** Update File: note.txt\n-a\n+b\n*** End Patch"},
        {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_1", "output": "done"},
    ),
    _with_item(
        "search", {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    ),
    _with_item("encrypted thoughts", {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "AA=="}),
    _with_item("compaction", {"type": "compaction", "id": "cmp_1", "encrypted_content": "AA=="}),
    _with_item("picture", {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "AA=="}),
    _with_item(
        "shell",
        {"type": "local_shell_call", "call_id": "call_2", "status": "completed", "action": {"type": "exec"}},
        {"type": "local_shell_call_output", "call_id": "call_2", "output": FOUND},
    ),
    _with_item(
        "tools found",
        {"type": "tool_search_call", "call_id": "call_3", "execution": "client", "arguments": {"query": "read"}},
        {"type": "tool_search_output", "call_id": "call_3", "execution": "client", "tools": []},
    ),
    _codex(
        "picture in a result",
        _CALL,
        {**_OUTPUT, "output": [{"type": "input_text", "text": FOUND}, {"type": "input_image", "image_url": "data:,"}]},
    ),
    _chat("opencode", "title", _said("user", "Name this talk."), _said("user", ASK), tools=None, tool_choice=None),
    *_chats_of("opencode", _said("user", ASK)),
    *_chats_of("Cline", _said("user", ASK), _said("user", "The task is not over.")),
    *_chats_of(
        "Qwen Code",
        _said("user", _parts(PLACE)),
        _said("assistant", "Thanks."),
        _said("user", _parts(ASK)),
        with_parts=True,
        tool_choice=None,
    ),
]


async def num_answered(client: httpx.AsyncClient, model: str, headers: Mapping[str, str]) -> int:
    """How many of `REQUESTS` a motet answers with a stream that ends as it should."""
    ends = ("message_stop", "response.completed", "response.incomplete", "[DONE]")
    count = 0
    for request in REQUESTS:
        answer = await client.post(request.path, json={"model": model, **request.body}, headers=headers)
        count += answer.status_code == 200 and any(end in answer.text for end in ends)
    return count
