"""Limits of requests' JSON bodies: their size, their parts, and how slowly they may arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from ..openai_api.errors import invalid_value
from ..openai_api.json_body import refuse_unsupported
from ..openai_api.request_schema import FORM_FIELDS, ChatMessage, ChatRequest, CompletionRequest, DetokenizeRequest
from .packed_request import BodyRequest

# A token of text is about 4 bytes; 12 where JSON escapes each character, as Python's `json` does. Longer tokens (runs
# of spaces) seldom follow one another.
BYTES_PER_TOKEN: Final = 32
FIXED_BYTES: Final = 256 << 10  # beside the prompts
MOST_BYTES: Final = 16 << 20  # unless the operator says otherwise
MAX_MESSAGES: Final = 8192  # of a chat; also parts of all its messages together, and prompts
MAX_NAME_CHARS: Final = 1024  # of names and ids
MAX_FREE_BYTES: Final = 128 << 10  # of JSON that is passed on unchanged, to the chat template or to llguidance
MAX_ARGUMENTS_CHARS: Final = 256 << 10  # of one tool call: it is parsed at once
MAX_CALLS_CHARS: Final = 512 << 10  # of the arguments of all tool calls of a chat


@dataclass(frozen=True)
class ArrivalPace:
    """The slowest pace at which a body may arrive. A slower one is refused, so that none holds memory for long."""

    grace_s: float  # before the first byte is due
    bytes_per_s: float  # the least rate, on average, after that
    deadline_s: float  # for the whole body

    def latest_s(self, num_bytes: int) -> float:
        """The time by which more than `num_bytes` must have arrived, in seconds since the request began."""
        return min(self.grace_s + num_bytes / self.bytes_per_s, self.deadline_s)


def max_body_bytes(context: int | None, num_prompts: int, configured_bytes: int | None) -> int:
    """The largest body with `num_prompts` prompts: as large as the model's context may need, and not much larger.

    `context`: of the model, in tokens; None: it is not known yet. `configured_bytes`: the operator's own limit, which
    replaces this.
    """
    if configured_bytes is not None:
        return configured_bytes
    if context is None:
        return MOST_BYTES
    return min(FIXED_BYTES + num_prompts * context * BYTES_PER_TOKEN, MOST_BYTES)


def check_extent(request: BodyRequest, context: int | None) -> None:
    """Raises a 400 for an implausible number of prompts or messages.

    A message takes at least one token of the context, and some time in the template.
    """
    if len(request.model) > MAX_NAME_CHARS:
        raise invalid_value("model", f"it has {len(request.model)} characters: at most {MAX_NAME_CHARS} are accepted.")
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        if not isinstance(prompt, str) and len(prompt) > MAX_MESSAGES and not isinstance(prompt[0], int):
            raise invalid_value("prompt", f"there are {len(prompt)} of them: at most {MAX_MESSAGES} are accepted.")
    if not isinstance(request, ChatRequest):
        return
    max_messages = MAX_MESSAGES if context is None else min(MAX_MESSAGES, context)
    if len(request.messages) > max_messages:
        raise invalid_value(
            "messages", f"there are {len(request.messages)} of them: at most {max_messages} are accepted."
        )
    num_parts = sum(len(message.content) for message in request.messages if isinstance(message.content, list))
    if num_parts > max_messages:
        raise invalid_value("messages", f"they have {num_parts} parts: at most {max_messages} together are accepted.")


def check_free(request: BodyRequest) -> BodyRequest:
    """Checks and returns the request of a large body. Raises 400 for values that are too large to pass on."""
    if isinstance(request, DetokenizeRequest):
        return request
    refuse_unsupported(request)
    for field in FORM_FIELDS:
        _check_free(getattr(request, field), field)
    if isinstance(request, ChatRequest):
        for param in ("chat_template_kwargs", "tools", "functions", "documents"):
            _check_free(getattr(request, param), param)
        num_left = MAX_CALLS_CHARS
        for position, message in enumerate(request.messages):
            _check_names(message, position)
            num_left -= _arguments_chars(message, position)
        if num_left < 0:
            problem = f"the arguments of all tool calls have over {MAX_CALLS_CHARS} characters."
            raise invalid_value("messages", problem)
    return request


def _arguments_chars(message: ChatMessage, position: int) -> int:
    """Characters in the arguments of all tool calls of the message."""
    calls = [call.function for call in message.tool_calls or ()]
    sizes = [len(call.arguments or "") for call in [*calls, *filter(None, [message.function_call])]]
    if max(sizes, default=0) > MAX_ARGUMENTS_CHARS:
        problem = f"arguments of at most {MAX_ARGUMENTS_CHARS} characters are accepted."
        raise invalid_value(f"messages[{position}].tool_calls", problem)
    return sum(sizes)


def _check_names(message: ChatMessage, position: int) -> None:
    for field in ("name", "tool_call_id"):
        if len(getattr(message, field) or "") > MAX_NAME_CHARS:
            raise invalid_value(f"messages[{position}].{field}", f"at most {MAX_NAME_CHARS} characters are accepted.")


def _check_free(value: object, param: str) -> None:
    num_bytes = len(msgspec.json.encode(value))
    if num_bytes > MAX_FREE_BYTES:
        raise invalid_value(param, f"it has {num_bytes} bytes of JSON: at most {MAX_FREE_BYTES} are accepted.")
