"""The fields of requests with one answer, of any API."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .request_schema import GenerationFields

_NO = Meta(description="`true` is refused.")


class OneAnswerFields(GenerationFields, frozen=True, kw_only=True):
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    prompt_logprobs: None = None  # an answer of these shows none
    use_beam_search: Annotated[bool | None, _NO] = None
    return_token_ids: Annotated[bool | None, _NO] = None
