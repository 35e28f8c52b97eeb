"""The sampling parameters, stop strings, beams and token rules of a request, checked against the model's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import msgspec

from ...kernels.sampling import PENALTIES, ShapingParams
from ...workers.wire.beams import BeamRules
from ...workers.wire.messages import GangInfo, SamplingParams, ThinkingBudget, TokenRules, Word
from ...workers.wire.prompt_scores import Pooling
from ..generation.generation import GenerationRequest, Prompt
from ..http.errors import context_length_exceeded, invalid_value, unsupported
from ..text.response_reader import ResponseReader
from ..text.stop_strings import StopStrings
from ..text.text import TextService
from .request_schema import CompletionRequest, GenerationFields

# Checks of a request against the limits of the model: its context and its vocabulary.


def check_length(num_prompt_tokens: int, max_tokens: int | None, gang: GangInfo, *, prompt_param: str) -> None:
    """Raises a 400 if the prompt and `max_tokens` do not fit the context. None: the completion takes what is left.

    A prompt may fill the context if nothing follows it.

    The message begins as vLLM's and OpenAI's: clients match on it, and shorten their prompts.
    """
    context = gang.max_model_len
    room = context - num_prompt_tokens
    if room < 0 or (room == 0 and max_tokens != 0):
        need = "the completion needs room, too" if room == 0 else f"these are {-room} too many"
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens. However, your {prompt_param} resulted in "
            f"{num_prompt_tokens} tokens: {need}. Please reduce the length of the {prompt_param} by at least "
            f"{1 - room} tokens.",
            prompt_param,
        )
    if max_tokens is not None and max_tokens > room:
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {prompt_param}, {max_tokens} in the "
            f"completion): these are {max_tokens - room} too many. Please reduce the length of the {prompt_param} or "
            f"completion: max_tokens may be at most {room} here.",
            "max_tokens",
        )


def num_kept(num_tokens: int, max_tokens: int | None, gang: GangInfo) -> int:
    """How many of a prompt's last tokens are kept. -1: all that leave room for `max_tokens`, or for one token."""
    if num_tokens == -1:
        return max(1, gang.max_model_len - (1 if max_tokens is None else max_tokens))
    return num_tokens


def check_num_tokens(num_tokens: int, gang: GangInfo, param: str) -> None:
    """Raises a 400 for more tokens than the context has."""
    if num_tokens > gang.max_model_len:
        raise context_length_exceeded(
            f"This model's maximum context length is {gang.max_model_len} tokens. However, your {param} are "
            f"{num_tokens} tokens.",
            param,
        )


def check_text(text: str, service: TextService, gang: GangInfo, prompt_param: str) -> None:
    """Raises a 400 for a text whose length shows, before it is tokenized, that it is too long for the context."""
    num_tokens, context = service.min_tokens(text), gang.max_model_len
    if num_tokens > context:
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens. However, your {prompt_param} resulted in at "
            f"least {num_tokens} tokens, at least {num_tokens - context} too many. Please reduce the length of the "
            f"{prompt_param}.",
            prompt_param,
        )


def check_token_ids(token_ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises a 400 for the first id that is not in the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    position = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
    raise invalid_value(
        f"{param}[{position}]", f"token id {token_ids[position]} is not in the vocabulary, 0 to {vocab_size - 1}."
    )


# Beam search of a request, in the fields of vLLM's API.

# Fields with which tokens have other probabilities than the model's own, unless they have these values.
_NEUTRAL: Final[Mapping[str, float]] = MappingProxyType(
    {name: getattr(ShapingParams(), name) for name in PENALTIES} | {"thinking_token_budget": -1}
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
    """The rules of the search for each prompt."""
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
    limit = gang.num_pages // 2 * gang.block_size // width
    return max(1, min(gang.max_model_len - num_prompt_tokens, limit))


# `best_of` of a completion request: more sequences are generated than requested, and the likeliest are the answer.


def check_best_of(request: CompletionRequest) -> None:
    """Raises a 400 for a `best_of` below n, and for one above n in a stream, which cannot choose afterwards."""
    n = request.n or 1
    if request.best_of is None or request.best_of == n:
        return
    if request.best_of < n:
        raise invalid_value("best_of", f"it is {request.best_of}, and at least n = {n} must be drawn.")
    if request.stream:
        raise invalid_value("best_of", "which are the best is only known at the end: a stream needs it equal to n.")


def with_best_of(generation: GenerationRequest, best_of: int) -> GenerationRequest:
    """`generation` with `best_of` sequences for each prompt, of which the n likeliest are the answer."""
    prompts = [_with_logprobs(prompt) for prompt in generation.prompts]
    return replace(generation, prompts=prompts, n=best_of, num_best=generation.n)


def _with_logprobs(prompt: Prompt) -> Prompt:
    """The prompt, with log probabilities of its tokens, by which sequences are ranked."""
    if prompt.sampling.num_logprobs is not None:
        return prompt
    return Prompt(prompt.token_ids, msgspec.structs.replace(prompt.sampling, num_logprobs=0))


# After how many tokens a model's thoughts end: vLLM's `thinking_token_budget`.


def thinking_budget(
    num_tokens: int, reader: ResponseReader | None, text: TextService
) -> tuple[ThinkingBudget | None, bool]:
    """None: they may go on. And whether what was requested can be held: tokens show where thoughts begin and end.

    `num_tokens`: of all thoughts; below 0: any number. `reader`: of the answer, at its begin.
    """
    if num_tokens < 0:
        return None, True
    if reader is None or not reader.reading.format.has_reasoning:
        return None, False
    texts = reader.reading.format.thought_marks
    marks = None if texts is None else [text.mark_ids(mark) for mark in texts]
    if marks is None or None in marks:
        return None, False
    begin, end = (mark for mark in marks if mark is not None)
    return ThinkingBudget(num_tokens, begin, end, reader.is_reasoning), True


# Rules for a request's tokens: vLLM's `allowed_token_ids`, `bad_words` and `min_tokens`, and a thinking budget.

MAX_WORD_TOKENS = 64  # of a bad word


async def token_rules(
    request: GenerationFields,
    text: TextService,
    gang: GangInfo,
    *,
    has_form: bool,
    thinking: ThinkingBudget | None = None,
) -> TokenRules | None:
    """None: all tokens are allowed. Raises a 400 for ids outside of the vocabulary, and for rules that allow no token.

    `has_form`: a grammar limits the tokens too, and the answer may end where the grammar does.
    """
    allowed, words = request.allowed_token_ids, request.bad_words or []
    min_tokens = request.min_tokens or 0
    if allowed is None and not words and not min_tokens:
        return None if thinking is None else TokenRules(thinking=thinking)
    if allowed is not None:
        check_token_ids(allowed, gang.vocab_size, "allowed_token_ids")
    late = {*(request.stop_token_ids or ()), *(() if request.ignore_eos else gang.eos_token_ids)} if min_tokens else ()
    ends = gang.eos_token_ids if has_form and allowed is not None else ()
    rules = TokenRules(
        allowed_token_ids=(*dict.fromkeys([*(allowed or ()), *ends]),),
        bad_words=await _tokenized(words, text),
        min_tokens=min_tokens,
        late_token_ids=(*sorted(late),),
        thinking=thinking,
    )
    banned = {*late, *(word[-1] for word in rules.bad_words)}
    if banned.issuperset(range(gang.vocab_size) if allowed is None else allowed):
        field = "bad_words" if words else "min_tokens"
        raise invalid_value(field, "with the other fields it may exclude all tokens.")
    return rules


async def _tokenized(words: list[str], text: TextService) -> tuple[Word, ...]:
    """Tokens of each word at the start of a text, and after a space if these are as many and begin differently.

    That is vLLM's rule.
    """
    if not words:
        return ()
    bare = [word.lstrip() for word in words]
    if any(not word for word in bare):
        raise invalid_value(f"bad_words[{bare.index('')}]", "it is empty.")
    spaced = [f" {word}" for word in bare]
    token_lists = await text.encode_all([*bare, *spaced], add_special_tokens=False)
    tokenized: dict[Word, None] = {}
    for position, (plain, behind) in enumerate(zip(token_lists, token_lists[len(bare) :], strict=False)):
        if len(plain) > MAX_WORD_TOKENS:
            message = f"it has {len(plain)} tokens: at most {MAX_WORD_TOKENS} are accepted."
            raise invalid_value(f"bad_words[{position}]", message)
        if not plain:
            raise invalid_value(f"bad_words[{position}]", "it has no tokens.")
        tokenized[(*plain,)] = None
        if len(behind) == len(plain) and behind[0] != plain[0]:
            tokenized[(*behind,)] = None
    return (*tokenized,)


# Which log-probabilities of its prompts a request asks for: `echo` with `logprobs`, or vLLM's `prompt_logprobs`.

MAX_SCORE_VALUES: Final = 1 << 20  # of all prompts and choices of an answer; each is some 50 bytes of its JSON


def num_echoed_logprobs(request: GenerationFields) -> int | None:
    """Likeliest tokens for each token of the prompt in the choices' `logprobs`; None: the prompt is not in them."""
    return request.num_logprobs if isinstance(request, CompletionRequest) and request.echo else None


def num_prompt_logprobs(request: GenerationFields) -> int | None:
    """Likeliest tokens for each token of the prompt that gangs compute; None: no log-probabilities are needed."""
    echoed, requested = num_echoed_logprobs(request), request.prompt_logprobs
    if echoed is None or requested is None:
        return requested if echoed is None else echoed
    return max(echoed, requested)


def check_prompt_scoring(request: GenerationFields) -> None:
    """Raises a 400 for fields that contradict it, in a request that asks for it."""
    field = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
    if request.stream:
        raise unsupported(field, "log probabilities of the prompt come with a whole answer only: leave stream out.")
    if request.use_beam_search:
        raise unsupported(field, "beam search does not compute log probabilities of the prompt: leave it out.")


def check_num_scores(request: GenerationFields, num_top: int, token_lists: Sequence[Sequence[int]]) -> None:
    """Raises a 400 for more of them than an answer may have. `num_top`: likeliest tokens of each."""
    num_values = sum(map(len, token_lists)) * (request.n or 1) * (1 + num_top)
    if num_values > MAX_SCORE_VALUES:
        field = "prompt_logprobs" if request.prompt_logprobs == num_top else "logprobs"
        raise invalid_value(
            field,
            f"prompt tokens times n times {1 + num_top} log probabilities of each are {num_values}: at most "
            f"{MAX_SCORE_VALUES} are accepted in one request. Send fewer prompts, or ask for fewer.",
        )


_SHAPING: Final = ShapingParams.__struct_fields__  # the request's fields of the same names; null: the default
MAX_STOP_CHARS = 4096  # of all stop strings of a request: an automaton is built of them


def sampling_params(
    request: GenerationFields,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    gang: GangInfo,
    rules: TokenRules | None = None,
    grammar: str = "",
    pooling: Pooling | None = None,
) -> SamplingParams:
    """The parameters of the first of a prompt's n sequences. Raises a 400 that names the wrong field.

    What the request leaves open is as the gang's model says, but for beams, which are not drawn.
    """
    stop_token_ids = tuple(request.stop_token_ids or ())
    if stop_token_ids:
        check_token_ids(stop_token_ids, gang.vocab_size, "stop_token_ids")
    if rules is not None and max_tokens is not None and rules.min_tokens > max_tokens:
        raise invalid_value("min_tokens", f"it is {rules.min_tokens}, and max_tokens is {max_tokens}.")
    defaults = {} if request.use_beam_search else gang.sampling_defaults
    shaping: dict[str, Any] = {name: value for name, value in defaults.items() if name in _SHAPING}
    shaping |= {name: value for name in _SHAPING if (value := getattr(request, name)) is not None}
    if shaping.get("top_p") == 0:  # the likeliest token alone
        shaping |= {"top_p": 1.0, "top_k": 1}
    elif shaping.get("top_k") == -1:
        shaping["top_k"] = 0
    return SamplingParams(
        **shaping,
        max_tokens=max_tokens,
        seed=request.seed,
        logit_bias=_logit_bias(request.logit_bias, gang.vocab_size) if request.logit_bias else {},
        rules=rules,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
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
    token_biases = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            raise invalid_value("logit_bias", f"key {key[:40]!r} is not a token id from 0 to {vocab_size - 1}.")
        token_biases[int(key)] = bias
    return token_biases
