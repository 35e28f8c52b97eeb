"""Beam search of a request, in the fields of vLLM's API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ...workers.wire.beams import BeamRules
from ...workers.wire.messages import GangInfo
from ..generation.generation import Prompt
from ..openai_api.errors import unsupported
from ..openai_api.request_schema import GenerationFields

# Fields with which tokens have other probabilities than the model's own, unless they have these values.
_NEUTRAL: Final[Mapping[str, int]] = MappingProxyType(
    {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "thinking_token_budget": -1}
)


def check_beams(request: GenerationFields) -> None:
    """Raises a 400 for fields that contradict `use_beam_search`, or that have no meaning without it."""
    if not request.use_beam_search:
        if request.length_penalty is not None and request.length_penalty != 1:
            raise unsupported("length_penalty", "only beams have one: send it with use_beam_search, or leave it out.")
        return
    if request.stream:
        raise unsupported("stream", "which beams are the best is only known at the end: leave it out.")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "n is the number of beams, and all of them are answered: leave it out.")
    if 0 in (request.max_tokens, getattr(request, "max_completion_tokens", None)):
        raise unsupported("max_tokens", "beams have at least one token: leave use_beam_search out.")
    for field, neutral in _NEUTRAL.items():
        if getattr(request, field, None) not in (None, neutral):
            raise unsupported(field, "beams are ranked by the model's own probabilities: leave it out.")
    for field in ("logit_bias", "min_tokens", "bad_words", "allowed_token_ids"):
        if getattr(request, field):
            raise unsupported(field, "beams are ranked by the model's own probabilities: leave it out.")


def beam_rules(request: GenerationFields, prompts: list[Prompt], gang: GangInfo) -> list[BeamRules]:
    """The rules of the search for each prompt; empty: the request does not ask for beams."""
    if not request.use_beam_search:
        return []
    ends = set(request.stop_token_ids or ())
    if not request.ignore_eos:
        ends.update(gang.eos_token_ids)
    return [
        BeamRules(
            width=request.n or 1,
            max_tokens=prompt.sampling.max_tokens or _max_tokens(len(prompt.token_ids), request.n or 1, gang),
            end_token_ids=frozenset(ends),
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            num_logprobs=prompt.sampling.num_logprobs or 0,
            may_stop=bool(request.stop),
        )
        for prompt in prompts
    ]


def _max_tokens(num_prompt_tokens: int, width: int, gang: GangInfo) -> int:
    """The default for beams: what the context leaves, and at most half of a pool if beams share no pages."""
    most = gang.num_pages // 2 * gang.block_size // width
    return max(1, min(gang.max_model_len - num_prompt_tokens, most))
