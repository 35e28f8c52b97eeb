"""How large the JSON body of a request may be, and how slowly bodies may arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from ..openai_api.errors import invalid_value
from ..openai_api.request_schema import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from ..openai_api.unsupported_fields import refuse_unsupported

# A token of text is about 4 bytes; 12 where JSON escapes each character, as Python's `json` does. Long tokens (runs of
# spaces) are seldom next to each other.
BYTES_PER_TOKEN: Final = 32
FIXED_BYTES: Final = 256 << 10  # beside the prompts
MOST_BYTES: Final = 16 << 20  # unless the operator says otherwise
MAX_MESSAGES: Final = 8192  # of a chat, parts of all of them together, and prompts
MAX_NAME_CHARS: Final = 1024  # of names and ids
MAX_FREE_BYTES: Final = 128 << 10  # of what is passed on to the chat template as it came, as JSON


@dataclass(frozen=True)
class ArrivalPace:
    """The least pace of a body. One that falls behind is refused, so that no client holds a place by sending slowly."""

    grace_s: float  # before any byte is needed
    bytes_per_s: float  # the least rate, on average, after that
    deadline_s: float  # for the whole body

    def latest_s(self, num_bytes: int) -> float:
        """When more than `num_bytes` must have arrived, in seconds since the request began."""
        return min(self.grace_s + num_bytes / self.bytes_per_s, self.deadline_s)


def max_body_bytes(context: int | None, num_prompts: int, given: int | None) -> int:
    """The largest body with `num_prompts` prompts: what the model's context can hold, and not much more.

    `context`: of the model, in tokens; None: it is not known yet. `given`: the operator's own limit, which replaces
    this.
    """
    if given is not None:
        return given
    if context is None:
        return MOST_BYTES
    return min(FIXED_BYTES + num_prompts * context * BYTES_PER_TOKEN, MOST_BYTES)


def check_extent(request: GenerationFields, context: int | None) -> None:
    """Raises a 400 for an implausible number of prompts or messages.

    A message takes a token of the context at least, and its template some time.
    """
    if len(request.model) > MAX_NAME_CHARS:
        raise invalid_value("model", f"it has {len(request.model)} characters: at most {MAX_NAME_CHARS} are accepted.")
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        if not isinstance(prompt, str) and len(prompt) > MAX_MESSAGES and not isinstance(prompt[0], int):
            raise invalid_value("prompt", f"there are {len(prompt)} of them: at most {MAX_MESSAGES} are accepted.")
    if not isinstance(request, ChatRequest):
        return
    most = MAX_MESSAGES if context is None else min(MAX_MESSAGES, context)
    if len(request.messages) > most:
        raise invalid_value("messages", f"there are {len(request.messages)} of them: at most {most} are accepted.")
    num_parts = sum(len(one.content) for one in request.messages if isinstance(one.content, list))
    if num_parts > most:
        raise invalid_value("messages", f"they have {num_parts} parts: at most {most} together are accepted.")


def without_ballast(request: GenerationFields) -> GenerationFields:
    """The request of a large body without values that nothing looks at. Raises 400 for what is too large to pass on."""
    refuse_unsupported(request)
    request = msgspec.structs.replace(request, tools=None)  # accepted only where they are not looked at
    if isinstance(request, ChatRequest):
        _check_free(request.chat_template_kwargs, "chat_template_kwargs")
        _check_free([message.tool_calls for message in request.messages if message.tool_calls], "messages")
        for position, message in enumerate(request.messages):
            _check_names(message, position)
    return request


def _check_names(message: ChatMessage, position: int) -> None:
    for field in ("name", "tool_call_id"):
        if len(getattr(message, field) or "") > MAX_NAME_CHARS:
            raise invalid_value(f"messages[{position}].{field}", f"at most {MAX_NAME_CHARS} characters are accepted.")


def _check_free(value: object, param: str) -> None:
    num_bytes = len(msgspec.json.encode(value))
    if num_bytes > MAX_FREE_BYTES:
        what = "the tool calls of all messages" if param == "messages" else "it"
        raise invalid_value(param, f"{what} has {num_bytes} bytes of JSON: at most {MAX_FREE_BYTES} are accepted.")
