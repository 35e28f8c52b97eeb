"""The sampling parameters and stop strings of a request, checked against the model's vocabulary."""

from __future__ import annotations

from ...workers.wire.embedding import Pooling
from ...workers.wire.messages import SamplingParams
from ...workers.wire.token_rules import TokenRules
from ..openai_api.errors import invalid_value
from ..openai_api.request_schema import GenerationFields
from ..text.stop_strings import StopStrings
from .model_limits import check_token_ids
from .prompt_scoring import num_prompt_logprobs

MAX_STOP_CHARS = 4096  # of all stop strings of a request: an automaton is built of them


def sampling_params(
    request: GenerationFields,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    vocab_size: int,
    rules: TokenRules | None = None,
    grammar: str = "",
    pooling: Pooling | None = None,
) -> SamplingParams:
    """The parameters of the first of a prompt's n sequences. Raises a 400 that names the wrong field."""
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    if rules is not None and max_tokens is not None and rules.min_tokens > max_tokens:
        raise invalid_value("min_tokens", f"it is {rules.min_tokens}, and max_tokens is {max_tokens}.")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=request.top_p or 1.0,
        top_k=1 if request.top_p == 0 else max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        seed=request.seed,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        rules=rules,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs(request),
        grammar=grammar,
        pooling=pooling,
    )


def stop_strings(request: GenerationFields) -> StopStrings:
    """The stop strings of the field `stop`, which is a text or a list of texts. Raises a 400 if they are too long."""
    stop = request.stop or ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    num_chars = sum(map(len, strings))
    if num_chars > MAX_STOP_CHARS:
        message = f"its strings have {num_chars} characters together: at most {MAX_STOP_CHARS} are accepted."
        raise invalid_value("stop", message)
    return StopStrings(strings)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    found = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            raise invalid_value("logit_bias", f"key {key[:40]!r} is not a token id from 0 to {vocab_size - 1}.")
        found[int(key)] = bias
    return found


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
