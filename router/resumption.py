"""The id of an answer: a new one, or that of the answer whose stream the client resumes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request

from ..adapters.adapter import AdapterVersion
from ..adapters.sight import owner_of
from .generation.generation import GenerationRequest
from .loop_share import LoopShare
from .openai_api.response_id import ResponseId, fingerprint_of, new_response_id
from .openai_api.stream_position import LAST_EVENT_ID, StreamPosition, parse_position, wrong_position
from .versions.version_choice import VersionChoice


def requested_position(
    http: Request, *, is_stream: bool | None, tenant: str, keys: Sequence[bytes]
) -> StreamPosition | None:
    """The position from which the client resumes a stream; None: it does not resume one. Raises a 400."""
    event_id = http.headers.get(LAST_EVENT_ID)
    if not event_id:
        return None
    if not is_stream:
        raise wrong_position("it is only allowed with stream: true.")
    return parse_position(event_id, tenant, keys)


async def answer_id(
    prefix: str, generation: GenerationRequest, position: StreamPosition | None, choice: VersionChoice, context: int
) -> tuple[ResponseId, VersionChoice]:
    """The answer's id, and the choice with the version that its stream began with. `context`: tokens of the model's.

    Raises a 400 if the resumed stream belongs to another request.
    """
    share, prompts = LoopShare(), []
    for prompt in generation.prompts:
        prompts.append(fingerprint_of(prompt))
        await share.pause()

    def fingerprint(version: AdapterVersion | None) -> bytes:
        stop = generation.stop.strings
        # Of equal content that of another user's private adapter is another's answer.
        digest = None if version is None else owner_of(version.name) + version.digest
        reading = [] if generation.reader is None else generation.reader.reading.identity
        parts = [generation.tenant, digest, prompts, generation.n, stop, generation.keep_token_ids, *reading]
        return fingerprint_of(*parts)

    if position is None:
        return new_response_id(prefix, int(time.time()), fingerprint(choice.version)), choice
    response_id = position.response_id
    for begun in choice.candidates():
        if response_id.prefix == prefix and fingerprint(begun) == response_id.fingerprint:
            _check_position(position, generation, context)
            return response_id, choice.with_version(begun)
    raise wrong_position(
        "it belongs to the answer to another request: send the same body with it. A stream cannot be resumed either if "
        "the version of the adapter that it began with is kept no more."
    )


def _check_position(position: StreamPosition, generation: GenerationRequest, context: int) -> None:
    """Raises a 400 for a position that the request's choices cannot have reached."""
    limits = [
        context - len(prompt.token_ids) if prompt.sampling.max_tokens is None else prompt.sampling.max_tokens
        for prompt in generation.prompts
        for _ in range(generation.n)
    ]
    if len(position.num_tokens) != len(limits):
        raise wrong_position(f"it has {len(position.num_tokens)} choices, and the request has {len(limits)}.")
    for index, (num_tokens, limit) in enumerate(zip(position.num_tokens, limits, strict=True)):
        if num_tokens > limit:
            raise wrong_position(f"it has {num_tokens} tokens of choice {index}, which has at most {limit}.")
