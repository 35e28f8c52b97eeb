"""A router's app with stand-ins: a dispatcher that follows a script, a registry in a dict, a tiny tokenizer."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from motet.adapters.adapter import AdapterVersion
from motet.adapters.errors import NameTaken
from motet.adapters.format.own_tokenizer import NO_OWN_TEXT, OwnText
from motet.adapters.format.peft import named_base
from motet.adapters.format.score_head import ScoreHead
from motet.adapters.registry.administration.administration import Administration
from motet.adapters.registry.canary_counts import CanaryCounts
from motet.adapters.registry.known_keys import KnownKeys
from motet.adapters.registry.preloads import Preloads
from motet.adapters.registry.registry import PAGE_SIZE
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.tenants.records import KeyRecord, Quota, StorageUse, TenantRecord
from motet.adapters.upload import UploadService
from motet.router.batches.batches import Batches
from motet.router.config import CurrentConfig
from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.known_gang import AdapterTier
from motet.router.fleet.leader_connection import FaultKind
from motet.router.fleet.pin_keeper import PinKeeper
from motet.router.http.route import RouteSpec
from motet.router.http.stream_position import EventIds
from motet.router.metrics import Metrics
from motet.router.rest_server import create_app
from motet.router.tenancy.account import Accountant
from motet.router.tenancy.quotas import Quotas
from motet.router.text.text import TextService
from motet.router.versions.canary_book import CanaryBook
from motet.tests.rigs.engine_loads import engine_load
from motet.tests.rigs.fake_stream import FakeStream
from motet.tests.rigs.operators import with_operator_key_in_loop
from motet.tests.rigs.part_configs import router_config
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.workers.wire.engine_load import EngineLoad
from motet.workers.wire.messages import (
    GangInfo,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    TokenLogprobs,
)
from motet.workers.wire.prompt_scores import packed_scores, packed_vector

BASE = "tiny/base"  # with a slash, as hub ids have
KEYS = {"key-of-acme": "acme", "key-of-zenith": "zenith"}
HEADERS = {"Authorization": "Bearer key-of-acme"}
OPERATOR_KEY = "key-of-operators"
OPERATORS = {"Authorization": f"Bearer {OPERATOR_KEY}"}
EOS = 1
VOCAB_SIZE = 320
CONTEXT = 256
CORPUS = ["hello world, the quick brown fox jumps over the lazy dog. héllo wörld 你好 世界"] * 20
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('an assistant cannot speak first') }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if mood is defined %}<|start|>mood: {{ mood }}<|end|>{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """A tokenizer like GPT-2's, with few merges, so that most characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def text_service(chat_template: str | None = CHAT_TEMPLATE) -> TextService:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|end|>")
    wrapped.chat_template = chat_template
    return TextService(wrapped)


@dataclass(frozen=True)
class Event:
    """A server-sent event. `id`: empty if it has none."""

    id: str
    data: str

    @property
    def chunk(self) -> Any:
        return json.loads(self.data)


def events_of(body: bytes) -> list[Event]:
    """The complete events in a stream's body, without comments; bytes after the last blank line are dropped."""
    events = []
    for block in body.split(b"\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.decode().split("\n"))
        if fields.keys() != {""}:
            events.append(Event(fields.get("id", ""), fields["data"]))
    return events


def counts_of(event_id: str) -> str:
    """The position in its stream that an event's id has."""
    return event_id.split(":")[1]


def sealed(answer: str, counts: str, tenant: str = "acme") -> str:
    """The id that a router gives an event at this position; it may be one that no stream comes to."""
    head = answer.partition(":")[0]
    seal = EventIds(head, tenant, FakeView.stream_keys[0]).seal(counts)
    return f"{head}:{counts}:{seal}"


def chunks_of(response: httpx.Response) -> list[Any]:
    """The chunks of a complete stream."""
    *events, last = events_of(response.content)
    assert last == Event("", "[DONE]")
    return [event.chunk for event in events]


def encoded(text: TextService, string: str) -> list[int]:
    return list(text._backend.encode(string, add_special_tokens=False).ids)


def decoded(text: TextService, token_ids: Sequence[int]) -> str:
    return str(text._backend.decode(token_ids, skip_special_tokens=True))


Script = Callable[[SequenceRequest], Sequence[SequenceUpdate]]


@dataclass
class FakeDispatcher:
    """Follows `script`; by default it returns `answer` token by token, at most `max_tokens`."""

    answer: Sequence[int] = ()
    script: Script | None = None
    hangs: bool = False  # after the script
    is_connected: bool = True
    num_resumed: int = 0
    num_moved: int = 0
    num_gang_faults: Mapping[FaultKind, int] = field(default_factory=dict)
    num_gangs: int = 1
    context: int = CONTEXT  # tokens
    eos_token_ids: tuple[int, ...] = ()  # that it says it has; the stand-in ends with EOS anyway
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    hidden_size: int = 8
    resident: set[tuple[str, str]] = field(default_factory=set)  # tenants, and digests of adapters that they use
    tiers: dict[str, AdapterTier] = field(default_factory=dict)  # of any adapter, by gang, where the gang is known
    submitted: list[SequenceRequest] = field(default_factory=list)
    limits: list[TimeLimit | None] = field(default_factory=list)  # of what was submitted
    resumed: list[bool] = field(default_factory=list)  # whether it was submitted as a resumed sequence
    streams: list[FakeStream] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # tenants

    def submit(
        self, request: SequenceRequest, *, is_resumed: bool = False, limit: TimeLimit | None = None
    ) -> FakeStream:
        updates = self.script(request) if self.script is not None else token_by_token(self.answer, request.sampling)
        if request.sampling.num_prompt_logprobs is not None:
            updates = ScoredFirst(request, updates)
        if request.sampling.pooling is not None:
            updates = [
                SequenceUpdate(
                    1, finish_reason="length", embedding=embedding_of(request.prompt_token_ids, self.hidden_size)
                )
            ]
        # As a gang does it, one of several sequences computes their prompt, and the others find it in the cache.
        shares_prompt = bool(self.submitted) and self.submitted[-1].prompt_token_ids is request.prompt_token_ids
        self.submitted.append(request)
        self.limits.append(limit)
        self.resumed.append(is_resumed)
        self.streams.append(FakeStream(updates, self.hangs, len(request.prompt_token_ids), shares_prompt=shares_prompt))
        return self.streams[-1]

    def gang(self) -> GangInfo | None:
        if not self.is_connected:
            return None
        return GangInfo(
            gang_id="gang-1",
            model="/a/folder/of/tiny",
            device="cpu",
            dtype="float32",
            kernels="torch",
            max_model_len=self.context,
            block_size=16,
            num_pages=64,
            page_bytes=1024,
            num_threads=1,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=self.eos_token_ids,
            sampling_defaults=self.sampling_defaults,
            hidden_size=self.hidden_size,
        )

    def gangs(self) -> list[tuple[GangInfo, EngineLoad]]:
        gang, load = self.gang(), self.load()
        return [] if gang is None or load is None else [(gang, load)] * self.num_gangs

    def bring(self, request: SequenceRequest, num_gangs: int, wait_s: float) -> dict[str, FakeStream]:
        num_connected = len(self.gangs())
        return {f"gang-{1 + number}": self.submit(request) for number in range(min(num_gangs, num_connected))}

    def residency(self, tenant: str, digest: str, known_gangs: Collection[str] = ()) -> Mapping[str, AdapterTier]:
        own: dict[str, AdapterTier] = {"gang-1": "device"} if (tenant, digest) in self.resident else {}
        return own | {gang: tier for gang, tier in self.tiers.items() if gang in known_gangs}

    def hold(self, tenant: str) -> None:
        self.held.append(tenant)

    def release(self, tenant: str) -> None:
        self.held.remove(tenant)

    def load(self) -> EngineLoad | None:
        return engine_load(num_running=3, num_generated_tokens=17) if self.is_connected else None


def token_by_token(token_ids: Sequence[int], sampling: SamplingParams) -> list[SequenceUpdate]:
    """An engine's updates for these tokens and an end-of-sequence token, cut at max_tokens and at a stop token."""
    wanted = [*token_ids, EOS][: sampling.max_tokens]
    if not wanted:
        return [SequenceUpdate(1, finish_reason="length")]
    stops = {EOS, *sampling.stop_token_ids}
    wanted = wanted[: next((place + 1 for place, token_id in enumerate(wanted) if token_id in stops), len(wanted))]
    return [
        SequenceUpdate(
            1,
            [token_id],
            None if sampling.num_logprobs is None else [logprobs_of(token_id, sampling.num_logprobs)],
            None if position < len(wanted) - 1 else "stop" if token_id in stops else "length",
        )
        for position, token_id in enumerate(wanted)
    ]


def embedding_of(token_ids: Sequence[int], hidden_size: int = 8) -> bytes:
    """Of a prompt: its first token and its length, packed, and the rest 1."""
    vector = np.ones(hidden_size)
    vector[:2] = token_ids[0], len(token_ids)
    return packed_vector(vector) or b""


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """-0.5 for the chosen token, which is the second most likely one; the last of the others is impossible."""
    others = [(token_id + 1) % 320, token_id, (token_id + 2) % 320][:num_top]
    return TokenLogprobs(-0.5, others, [-0.25, -0.5, float("-inf")][:num_top])


class ScoredFirst(Sequence[SequenceUpdate]):
    """Updates with the scores of a prompt, made as they are read, and `rest` after them.

    -1, -2, … for the tokens after the first: each the second most likely; the last of the others are impossible.
    """

    def __init__(self, request: SequenceRequest, rest: Sequence[SequenceUpdate]) -> None:
        self._token_ids = np.array(request.prompt_token_ids[1:], dtype=np.int32)
        self._num_top, self._rest = request.sampling.num_prompt_logprobs or 0, rest
        self._starts = range(0, len(self._token_ids), 128)

    def __len__(self) -> int:
        return len(self._starts) + len(self._rest)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self._starts):
            return self._rest[index - len(self._starts)]
        start, num_top = self._starts[index], self._num_top
        token_ids = self._token_ids[start : start + 128]
        logprobs = -np.arange(start + 1, start + len(token_ids) + 1, dtype=np.float32)
        top_ids = (token_ids[:, None] + np.array([1, 0, *range(2, max(num_top, 2))])) % 320
        top_logprobs = np.full(top_ids.shape, -np.inf, dtype=np.float32)
        top_logprobs[:, 0], top_logprobs[:, 1] = logprobs + 0.5, logprobs
        ranks = np.full(len(token_ids), 2)
        scores = packed_scores(logprobs, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top])
        return SequenceUpdate(1, prompt_scores=scores)


def failing(kind: Any, message: str, after: Sequence[int] = ()) -> Script:
    """A script that gives some tokens, then up."""

    def script(request: SequenceRequest) -> Sequence[SequenceUpdate]:
        tokens = [SequenceUpdate(1, [token_id]) for token_id in after]
        return [*tokens, SequenceUpdate(1, error=SequenceError(kind, message))]

    return script


class FakeRegistry:
    """Stands in for view and upload service. Methods that ask Redis in reality raise `error`."""

    def __init__(self) -> None:
        # Of each upload.
        self.left_out = self.unknown_field = ""
        self.invocation_token_ids: tuple[int, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.adapters: dict[tuple[str, str], AdapterVersion] = {}
        self.own_texts: dict[str, OwnText] = {}  # by digest
        self.heads: dict[str, ScoreHead | Exception] = {}  # by digest of the adapter
        self.num_read_heads = 0
        self.error: Exception | None = None
        self.uploaded: list[tuple[str, str, bytes, str]] = []  # tenant, name, config, digest of the tensors
        self.connected = True
        self.quotas: dict[str, Quota] = {}  # by tenant

    def add(
        self,
        tenant: str,
        name: str,
        digest: str = "d" * 64,
        base: str = "",
        response_template: str = "",
        chat_template: str = "",
        own_text: OwnText = NO_OWN_TEXT,
        head: ScoreHead | None = None,
    ) -> AdapterVersion:
        """`chat_template`: its source."""
        version = self.adapters[tenant, name].version + 1 if (tenant, name) in self.adapters else 1
        ranks, reported = {"q_proj": 8, "v_proj": 4}, dict[str, Any](base=base, response_template=response_template)
        own_text = OwnText(chat_template) if chat_template else own_text
        if own_text != NO_OWN_TEXT:
            reported["own_text"] = own_text.digest
            self.own_texts[own_text.digest] = own_text
        if head is not None:
            self.heads[digest], reported["num_labels"] = head, head.num_labels
        adapter = AdapterVersion(tenant, name, version, digest, ranks, 1234, 1700000000.5, **reported)
        self.adapters[tenant, name] = adapter
        return adapter

    def key(self, key: str) -> KeyRecord | None:
        tenant = KEYS.get(key)
        return None if tenant is None else KeyRecord(key_id=f"id of {key}", tenant=tenant)

    def tenant(self, name: str) -> TenantRecord:
        return TenantRecord(name=name, quota=self.quotas.get(name, Quota()))

    def held(self, tenant: str, name: str) -> AdapterVersion | None:
        return self.adapters.get((tenant, name))

    def of(self, tenant: str) -> list[AdapterVersion]:
        return [adapter for (owner, _), adapter in sorted(self.adapters.items()) if owner == tenant]


class FakeView(FakeRegistry):
    stream_keys: tuple[bytes, ...] = (b"all routers of a test share it",)
    is_whole = True
    is_unreachable = False
    last_event = 0
    keys = KnownKeys()  # of which there are none

    async def resolve(self, tenant: str, name: str, sight: object = None) -> AdapterVersion | None:
        adapter = self.held(tenant, name)
        if adapter is None and self.error is not None and not self.is_whole:
            raise self.error
        return adapter

    async def list_adapters(
        self, tenant: str, after: str = "", limit: int = PAGE_SIZE, sight: object = None
    ) -> list[AdapterVersion]:
        if self.error is not None and not self.is_whole:
            raise self.error
        return [adapter for adapter in self.of(tenant) if adapter.name > after][:limit]


class FakeUploads:
    def __init__(self, registry: FakeRegistry) -> None:
        self._registry = registry

    async def upload(
        self, tenant: str, name: str, config: bytes, tensors: Path, *, must_be_new: bool = False, **given: Any
    ) -> tuple[AdapterVersion, bool]:
        self._answer()
        hasher = hashlib.sha256()
        with tensors.open("rb") as file:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
        digest = hasher.hexdigest()
        base = named_base(config)
        left_out, unknown_field = self._registry.left_out, self._registry.unknown_field
        warnings = self._registry.warnings
        facts = SimpleNamespace(base=base, left_out=left_out, unknown_field=unknown_field, warnings=warnings)
        facts.invocation_token_ids = self._registry.invocation_token_ids
        facts.untrained_token_ids = tuple(token.id for token in given.get("own_text", NO_OWN_TEXT).tokens)
        given["check"](facts)
        self._registry.uploaded.append((tenant, name, config, digest))
        held = self._registry.held(tenant, name)
        if held is not None and must_be_new:
            raise NameTaken(name)
        if held is not None and held.digest == digest:
            return held, False
        forms = {
            "response_template": given.get("response_template", ""),
            "own_text": given.get("own_text", NO_OWN_TEXT),
        }
        return self._registry.add(tenant, name, digest, base, **forms), True

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    async def own_text(self, adapter: AdapterVersion) -> OwnText:
        return self._registry.own_texts[adapter.own_text] if adapter.own_text else NO_OWN_TEXT

    async def score_head(self, adapter: AdapterVersion) -> ScoreHead:
        self._registry.num_read_heads += 1
        head = self._registry.heads[adapter.digest]
        if isinstance(head, Exception):
            raise head
        return head

    async def stored(self, tenant: str, key_id: str) -> tuple[StorageUse, StorageUse]:
        self._answer()
        mine = self._registry.of(tenant)
        return StorageUse(len(mine), sum(adapter.num_bytes for adapter in mine)), StorageUse()

    async def delete(
        self, tenant: str, name: str, entry: object = None, sight: object = None, admission: object = None
    ) -> str | None:
        self._answer()
        return None if self._registry.adapters.pop((tenant, name), None) is None else name

    async def list_page(self, tenant: str, after: str, limit: int, sight: object = None) -> list[AdapterVersion]:
        self._answer()
        return [adapter for adapter in self._registry.of(tenant) if adapter.name > after][:limit]

    async def get(self, tenant: str, name: str, sight: object = None) -> AdapterVersion | None:
        self._answer()
        return self._registry.held(tenant, name.removeprefix("~/"))

    def _answer(self) -> None:
        if self._registry.error is not None:
            raise self._registry.error


class RouterRig:
    """The app and its stand-ins."""

    def __init__(
        self,
        spool_path: Path,
        text: TextService,
        quotas: Quotas | None = None,
        *,
        accountants: Sequence[Accountant] = (),
        more_routes: Callable[[RegistryView], Sequence[RouteSpec]] = lambda view: (),
        administration: Administration | None = None,
        counts: CanaryCounts | None = None,
        preloads: Preloads | None = None,
        pins: PinKeeper | None = None,
        make_batches: Callable[[RegistryView, CurrentConfig, Metrics], Batches] | None = None,
        **config: Any,
    ) -> None:
        """`counts`: of canaries; None: no version can be put on trial. `make_batches`: None: there are none."""
        self.text = text
        self.dispatcher = FakeDispatcher()
        self.registry = FakeView()
        self.spool_path = spool_path
        self.config = CurrentConfig(router_config(BASE, spool_path, **config))
        view, metrics = cast(RegistryView, self.registry), Metrics()
        self.metrics = metrics
        self.app: Starlette = create_app(
            config=self.config,
            metrics=metrics,
            batches=None if make_batches is None else make_batches(view, self.config, metrics),
            dispatcher=self.dispatcher,
            view=view,
            uploads=cast(UploadService, FakeUploads(self.registry)),
            text=text,
            operator_key=OPERATOR_KEY,
            quotas=quotas,
            accountants=accountants,
            more_routes=more_routes,
            administration=administration,
            canaries=None if counts is None else CanaryBook(counts),
            preloads=preloads,
            pins=pins,
        )

    def ids(self, text: str) -> list[int]:
        return encoded(self.text, text)

    def client(self) -> httpx.AsyncClient:
        """A client in this event loop, without a server. A whole answer arrives at once."""
        transport = httpx.ASGITransport(app=self.app)
        hooks = {"request": [with_operator_key_in_loop(OPERATOR_KEY)]}
        return httpx.AsyncClient(transport=transport, base_url="http://router", headers=HEADERS, event_hooks=hooks)


async def posted(rig: RouterRig, path: str, **fields: Any) -> Any:
    """The answer to a request for the base."""
    async with rig.client() as client:
        return await client.post(path, json={"model": BASE, **fields})


async def completed(rig: RouterRig, path: str = "/v1/completions", **fields: Any) -> Any:
    """The same, to one for a completion of "hello"."""
    return await posted(rig, path, **{"prompt": "hello", **fields})


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The app behind a real server on loopback, on a thread of its own. Gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert server.started, "the server ended"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=1)  # it closes idle connections, whose sockets would be left open else
        server.force_exit = True
        thread.join(timeout=PATIENCE_S)
