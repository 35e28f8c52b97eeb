"""Sequence classifiers and reward models: what an adapter's score head makes of the last token's state of a prompt.

Requests and answers of vLLM's `/classify`, `/score` and `/rerank` as data, and the heads that a router keeps. A gang
computes the states, as for embeddings; the head is multiplied here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from ..adapters.adapter import AdapterVersion
from ..adapters.errors import AdapterCorrupt, StoreUnavailable
from ..adapters.format.score_head import ScoreHead
from ..adapters.tenant_places import TenantPlaces
from ..workers.wire.messages import GangInfo
from ..workers.wire.prompt_scores import unpacked_vector
from .embeddings import MAX_NUMBERS, PromptUsage
from .generation.choice import Delta
from .generation.usage import Usage
from .http.errors import ApiError, invalid_value, unavailable, unsupported
from .http.loop_turns import LoopShare
from .openai.answer_form import UnstreamedForm
from .openai.chat_answer import AnswerHead
from .openai.chat_prompt import chat_prompt, completion_prompts, count_prompts
from .openai.request_schema import (
    MAX_TIMEOUT_S,
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Tool,
)
from .openai.sampling_params import check_length, check_text
from .text.text import TextService

MAX_PAIR_CHARS: Final = 16 << 20  # of all pairs of a request: each repeats its query
_REFUSED = Meta(description="Refused but null.")
_OLD_NAME = Meta(description="`use_activation`, as older servers call it.")
_Texts = str | list[str]


class RerankDocument(msgspec.Struct, frozen=True):
    text: str


class _HeadFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that these requests share. Those that are not vLLM's mean the same as at /v1/completions."""

    model: Annotated[str, Meta(description="One of your adapters with a score head (PEFT's task_type SEQ_CLS).")]
    use_activation: Annotated[
        bool | None, Meta(description="False: the head's own numbers, without softmax or sigmoid.")
    ] = None
    activation: Annotated[bool | None, _OLD_NAME] = None
    softmax: Annotated[bool | None, _OLD_NAME] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Begin and end as the model's tokenizer does.")] = None
    user: Annotated[str, Meta(max_length=512, description="For whom you ask, in your own words.")] | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S, description="Seconds for the whole answer.")] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100, description="Among your own, the higher goes first.")] | None = None
    service_tier: Annotated[str, Meta(max_length=64, description="`flex` yields to everybody.")] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024, description="KV is shared only with equal salts.")] | None = None

    @property
    def is_activated(self) -> bool:
        return False not in (self.use_activation, self.activation, self.softmax)


class ClassifyRequest(_HeadFields, frozen=True, kw_only=True):
    input: Annotated[
        str | list[str | int | list[int]] | None,
        Meta(description="A text, several, token ids, or several lists of them."),
    ] = None
    messages: (
        Annotated[list[ChatMessage], Meta(min_length=1, description="A chat, in place of input, by the chat template.")]
        | None
    ) = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS, description="The template shows them.")] | None = None
    add_generation_prompt: Annotated[bool | None, Meta(description="False by default; of the chat template.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="The last message is not ended.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="For the chat template, as it is.")] = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="So many of an input's last tokens are read; -1: what has room.")] | None
    ) = None
    chat_template: Annotated[Any, _REFUSED] = None


class ScoreRequest(_HeadFields, frozen=True, kw_only=True):
    text_1: Annotated[_Texts | None, Meta(description="A text, for all of text_2, or as many as these.")] = None
    text_2: Annotated[_Texts | None, Meta(description="A text, or several.")] = None
    queries: Annotated[_Texts | None, Meta(description="`text_1`.")] = None
    documents: Annotated[_Texts | None, Meta(description="`text_2`.")] = None
    truncate_prompt_tokens: Annotated[Any, _REFUSED] = None


class RerankRequest(_HeadFields, frozen=True, kw_only=True):
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, description="Texts, or objects with a text.")]
    top_n: Annotated[int, Meta(ge=0, description="So many of the best are answered; 0: all.")] | None = None
    return_documents: Annotated[bool | None, Meta(description="False: results have no texts.")] = None
    truncate_prompt_tokens: Annotated[Any, _REFUSED] = None
    max_tokens_per_doc: Annotated[Any, _REFUSED] = None  # Cohere's, as are the next two
    max_chunks_per_doc: Annotated[Any, _REFUSED] = None
    rank_fields: Annotated[Any, _REFUSED] = None


# What of these requests is computed: prompts, after which nothing is generated.


class ClassifyPrompts(ChatRequest, frozen=True, kw_only=True):
    """A chat, or the prompts in its place."""

    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    prompt: str | list[str | int | list[int]] | None = None
    is_activated: bool


class PairPrompts(CompletionRequest, frozen=True, kw_only=True):
    """`prompt`: `num_queries` texts, then those that each is paired with: one query with all, or each with its own."""

    num_queries: int
    is_activated: bool


class RerankPrompts(PairPrompts, frozen=True, kw_only=True):
    top_n: int  # 0: all
    with_documents: bool


HeadPrompts = ClassifyPrompts | PairPrompts
_SHARED: Final = ("model", "user", "add_special_tokens", "timeout", "priority", "service_tier", "cache_salt")
_OF_CHATS: Final = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "chat_template")
_SHORTER: Final = "a pair has no tokens that could be left out: shorten its texts."
# Of fields of these: see `renamed`.
NAMES: Final = MappingProxyType({"prompt": "input"})
PAIR_NAMES: Final = MappingProxyType({"prompt": "documents"})


def classify_prompts(request: ClassifyRequest) -> ClassifyPrompts:
    """Raises a 400 that names a field of the request."""
    if (request.input is None) == (request.messages is None):
        raise invalid_value("input", "either an input or messages are needed.")
    fields: dict[str, Any] = {field: getattr(request, field) for field in (*_SHARED, *_OF_CHATS)}
    if request.messages is None:
        if chat_fields := [field for field in _OF_CHATS if fields[field] is not None]:
            raise invalid_value(chat_fields[0], "it is for messages.")
    elif fields["add_generation_prompt"] is None:
        fields["add_generation_prompt"] = False
    return ClassifyPrompts(
        messages=request.messages or [],
        prompt=request.input,
        max_tokens=0,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        is_activated=request.is_activated,
        **fields,
    )


def score_prompts(request: ScoreRequest) -> PairPrompts:
    """Raises a 400 that names a field of the request."""
    first, queries = _one_of(request, "text_1", "queries")
    second, documents = _one_of(request, "text_2", "documents")
    if len(queries) not in (1, len(documents)):
        problem = f"it has {len(queries)} texts and {second} {len(documents)}: one is needed, or as many."
        raise invalid_value(first, problem)
    return PairPrompts(**_pairs(request, queries, documents, second))


def rerank_prompts(request: RerankRequest) -> RerankPrompts:
    """Raises a 400 that names a field of the request."""
    for field in ("max_tokens_per_doc", "max_chunks_per_doc"):
        if getattr(request, field) is not None:
            raise unsupported(field, _SHORTER)
    if request.rank_fields is not None:
        raise unsupported("rank_fields", "a document is a text, or an object with a text.")
    documents = [document if isinstance(document, str) else document.text for document in request.documents]
    pairs = _pairs(request, [request.query], documents, "documents")
    return RerankPrompts(top_n=request.top_n or 0, with_documents=request.return_documents is not False, **pairs)


def _one_of(request: ScoreRequest, name: str, other: str) -> tuple[str, list[str]]:
    """The field's name, and its texts."""
    values = {field: getattr(request, field) for field in (name, other) if getattr(request, field) is not None}
    if len(values) != 1:
        raise invalid_value(name, f"either {name} or {other} is needed.")
    ((field, texts),) = values.items()
    if not texts and not isinstance(texts, str):
        raise invalid_value(field, "it is an empty list: at least one text is needed.")
    return field, [texts] if isinstance(texts, str) else texts


def _pairs(
    request: ScoreRequest | RerankRequest, queries: list[str], documents: list[str], param: str
) -> dict[str, Any]:
    """The fields of `PairPrompts`. Raises a 400, also for texts that are too long together."""
    if request.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", _SHORTER)
    num_repeats = len(documents) // len(queries)
    num_chars = sum(map(len, documents)) + num_repeats * sum(map(len, queries))
    if num_chars > MAX_PAIR_CHARS:
        problem = f"all pairs have {num_chars} characters, each with its query: at most {MAX_PAIR_CHARS} are accepted."
        raise invalid_value(param, problem)
    return {
        "prompt": [*queries, *documents],
        "num_queries": len(queries),
        "is_activated": request.is_activated,
        "max_tokens": 0,
        **{field: getattr(request, field) for field in _SHARED},
    }


def num_inputs(request: HeadPrompts) -> int:
    """Prompts that are computed."""
    if isinstance(request, PairPrompts):
        return len(request.prompt) - request.num_queries
    return 1 if request.prompt is None else count_prompts(_texts_of(request))


def _texts_of(request: ClassifyPrompts) -> CompletionRequest:
    """The prompts that are no chat, as of a completion."""
    assert request.prompt is not None
    return CompletionRequest(
        model=request.model,
        prompt=request.prompt,
        max_tokens=0,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        add_special_tokens=request.add_special_tokens,
    )


async def classified_prompts(request: ClassifyPrompts, text: TextService, gang: GangInfo) -> list[list[int]]:
    """The token ids of each prompt. Raises 400."""
    if request.prompt is None:
        token_lists = [(await chat_prompt(request, text, gang)).token_ids]
        check_length(len(token_lists[0]), 0, gang, prompt_param="messages")
    else:
        token_lists = await completion_prompts(_texts_of(request), text, gang)
    return [text.without_padding(token_ids) for token_ids in token_lists]


async def paired_prompts(request: PairPrompts, text: TextService, gang: GangInfo) -> list[list[int]]:
    """The token ids of each pair, as the tokenizer joins two texts. Raises 400."""
    share, texts = LoopShare(), [str(prompt) for prompt in request.prompt]
    for each in texts:
        check_text(each, text, gang, "documents")
        await share.pause()
    encoded = await text.encode_all(texts, add_special_tokens=False)
    before, between, behind = text.pair_marks if request.add_special_tokens is not False else ([], [], [])
    queries, documents = encoded[: request.num_queries], encoded[request.num_queries :]
    token_lists = []
    for index, document in enumerate(documents):
        query = queries[index if len(queries) > 1 else 0]
        token_ids = [*before, *query, *between, *document, *behind]
        if not token_ids:
            raise invalid_value(f"documents[{index}]", "the pair is empty: at least one token is needed.")
        check_length(len(token_ids), 0, gang, prompt_param="documents")
        token_lists.append(text.without_padding(token_ids))
        await share.pause()
    return token_lists


def check_classifier(version: AdapterVersion | None, request: HeadPrompts) -> AdapterVersion:
    """The version that answers, which has a head for the request. Raises a 400 else, and for too large an answer."""
    if version is None or not version.num_labels:
        raise invalid_value(
            "model",
            f"`{request.model}` has no score head: an adapter that PEFT has trained with task_type SEQ_CLS is needed.",
        )
    if isinstance(request, PairPrompts) and version.num_labels > 1:
        problem = f"`{request.model}` has {version.num_labels} labels, and a score has one: use /v1/classify."
        raise invalid_value("model", problem)
    limit = MAX_NUMBERS["float"] // version.num_labels
    if (count := num_inputs(request)) > limit:
        problem = f"{count} inputs times {version.num_labels} labels are too many for an answer: send at most {limit}."
        raise invalid_value("input", problem)
    return version


def generates_no_text(version: AdapterVersion, model: str) -> ApiError:
    """A 400: a version with a score head was trained without the head of the vocabulary."""
    calls = "/v1/classify, /v1/score or /v1/rerank" if version.num_labels == 1 else "/v1/classify"
    problem = f"`{model}` is a sequence classifier (task_type SEQ_CLS), which generates no text: use {calls}."
    return invalid_value("model", problem)


# Heads in a router's memory.

MAX_KEPT_BYTES: Final = 128 << 20  # of all heads
NUM_PLACES: Final = 4  # for reading a head, or multiplying with it, in a thread; a tenant has one of them


class ScoreHeads:
    """The heads that were used last, of each tenant its own. Belongs to one event loop."""

    def __init__(self, read: Callable[[AdapterVersion], Awaitable[ScoreHead]]) -> None:
        """`read`: a version's head, in float32, from the store."""
        self._read = read
        self._heads: OrderedDict[tuple[str, str], ScoreHead] = OrderedDict()  # the last used one last
        self._num_bytes = 0
        self._places = TenantPlaces(NUM_PLACES)

    async def check(self, tenant: str, version: AdapterVersion) -> None:
        """Raises a 500 for a head that is damaged, and a 503 if the store cannot be read."""
        if (tenant, version.digest) not in self._heads:
            async with self._places.of(tenant):
                await self._head(tenant, version)

    async def apply(self, tenant: str, version: AdapterVersion, form: HeadForm, usage: Usage) -> None:
        """Gives the form its numbers. Raises as `check`, and a 422 for numbers that are not finite."""
        async with self._places.of(tenant):
            head = await self._head(tenant, version)
            await asyncio.to_thread(form.compute, head)

    async def _head(self, tenant: str, version: AdapterVersion) -> ScoreHead:
        key = tenant, version.digest
        head = self._heads.get(key)
        if head is None:
            try:
                head = await self._read(version)
            except StoreUnavailable as error:
                raise unavailable(str(error), "store_unavailable") from error
            except AdapterCorrupt as error:
                raise ApiError(500, str(error), code="adapter_failed") from error
            self._heads[key] = head
            self._num_bytes += head.num_bytes
            while self._num_bytes > MAX_KEPT_BYTES:
                self._num_bytes -= self._heads.popitem(last=False)[1].num_bytes
        else:
            self._heads.move_to_end(key)
        return head


# Answers.


class Classified(msgspec.Struct, frozen=True):
    index: int  # of the input
    label: str  # of the largest of the next
    probs: list[float]  # by label; with `use_activation` false the head's own numbers
    num_classes: int


class ClassifiedList(msgspec.Struct, frozen=True):
    id: str
    created: int  # Unix time, seconds
    model: str
    data: list[Classified]
    usage: PromptUsage
    object: Literal["list"] = "list"


class PairScore(msgspec.Struct, frozen=True):
    index: int  # of the pair
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, frozen=True):
    id: str
    created: int  # Unix time, seconds
    model: str
    data: list[PairScore]
    usage: PromptUsage
    object: Literal["list"] = "list"


class RerankResult(msgspec.Struct, frozen=True):
    index: int  # of the document
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankAnswer(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[RerankResult]  # the most relevant first
    usage: PromptUsage


_encode: Final = msgspec.json.Encoder().encode


class HeadForm(UnstreamedForm):
    """An `AnswerForm` of which `ScoreHeads.apply` makes the numbers."""

    def __init__(self, head: AnswerHead, request: HeadPrompts) -> None:
        self._head, self._is_activated = head, request.is_activated
        self._vectors: list[bytes | None] = [None] * num_inputs(request)
        self._numbers: NDArray[np.float32] = np.empty((0, 0), np.float32)  # [num_inputs, num_labels]
        self._logits = self._numbers  # order them: probabilities of large ones are equal

    def take(self, index: int, delta: Delta) -> None:
        self._vectors[index] = delta.embedding

    def document(self, usage: Usage) -> Iterator[bytes]:
        raise NotImplementedError

    def compute(self, head: ScoreHead) -> None:
        """Makes the answer's numbers, once all states are there. Blocking. Raises a 422 for what is not finite."""
        states = [unpacked_vector(vector) for vector in self._vectors if vector is not None]
        if len(states) < len(self._vectors):
            raise RuntimeError("a gang has sent no states: is it one of an older motet?")
        logits = head.logits(states)
        if not np.isfinite(logits).all():
            problem = "The adapter's score head overflows: its weights are too large."
            raise ApiError(422, problem, code="adapter_overflow")
        self._numbers, self._logits = activated(logits) if self._is_activated else logits, logits


class ClassifyForm(HeadForm):
    def document(self, usage: Usage) -> Iterator[bytes]:
        head = self._head
        whole = ClassifiedList(head.id, head.created, head.model, [], _usage(usage))
        entries = (
            Classified(index, f"LABEL_{logits.argmax()}", row.tolist(), len(row))
            for index, (logits, row) in enumerate(zip(self._logits, self._numbers, strict=True))
        )
        return _listed(whole, b'"data":[]', entries)


class ScoreForm(HeadForm):
    def document(self, usage: Usage) -> Iterator[bytes]:
        head = self._head
        whole = ScoreList(head.id, head.created, head.model, [], _usage(usage))
        entries = (PairScore(index, score) for index, score in enumerate(self._numbers[:, 0].tolist()))
        return _listed(whole, b'"data":[]', entries)


class RerankForm(HeadForm):
    def __init__(self, head: AnswerHead, request: RerankPrompts) -> None:
        super().__init__(head, request)
        self._top_n = request.top_n
        self._documents: Sequence[Any] = request.prompt[request.num_queries :] if request.with_documents else ()

    def document(self, usage: Usage) -> Iterator[bytes]:
        scores = self._numbers[:, 0].tolist()
        best = np.argsort(-self._logits[:, 0], kind="stable").tolist()[: self._top_n or None]
        whole = RerankAnswer(self._head.id, self._head.model, [], _usage(usage))
        entries = (
            RerankResult(index, scores[index], RerankDocument(self._documents[index]) if self._documents else UNSET)
            for index in best
        )
        return _listed(whole, b'"results":[]', entries)


def activated(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities `[n, num_labels]`: the softmax of several labels, the sigmoid of one.

    >>> activated(np.array([[0.0], [1000.0]])).tolist(), activated(np.array([[5.0, 5.0]])).tolist()
    ([[0.5], [1.0]], [[0.5, 0.5]])
    """
    if logits.shape[1] == 1:
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-logits)))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _usage(usage: Usage) -> PromptUsage:
    return PromptUsage(usage.prompt_tokens, usage.prompt_tokens)


def _listed(whole: msgspec.Struct, empty: bytes, entries: Iterator[msgspec.Struct]) -> Iterator[bytes]:
    """JSON of `whole`, with `entries` in its list, which is `empty`, entry by entry."""
    before, after = _encode(whole).split(empty, 1)
    yield before + empty[:-1]
    for index, entry in enumerate(entries):
        yield (b"," if index else b"") + _encode(entry)
    yield b"]" + after
