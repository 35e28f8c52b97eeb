"""/v1/adapters: upload, list, show, delete."""

from __future__ import annotations

import errno
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, structs
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.adapter import AdapterVersion
from ...adapters.errors import (
    AdapterCorrupt,
    AdapterInvalid,
    CallerGone,
    NoSuchName,
    StoreUnavailable,
    UploadUnchecked,
    VersionRefused,
    listed,
    quote,
)
from ...adapters.format.combination import (
    MAX_PARTS,
    Combination,
    CombinationType,
    MajoritySign,
    WeightedAdapter,
    combination_problem,
)
from ...adapters.format.own_tokenizer import NO_OWN_TEXT, OwnText, OwnToken, template_digest
from ...adapters.names import BaseNames, owner_of, split_selector
from ...adapters.registry.tenants.records import storage_bounds
from ...adapters.registry.versions.name_state import MAX_NOTE_CHARS, VersionNote
from ...adapters.tenant_places import TenantPlaces
from ...adapters.upload import CheckedUpload, UploadService
from ..bodies.request_decoder import ArrivalPace
from ..config import CurrentConfig
from ..http.access_log import record_of
from ..http.auth import Identity
from ..http.errors import ApiError, invalid_value
from ..http.list_page import PAGE_QUERY, ListPage, list_answer, page_request, read_page
from ..http.route import route
from ..metrics import Metrics
from ..tenancy.quotas import Quotas
from ..text.adapter_texts import AdapterTexts
from ..text.text import TextService
from .upload_form import AdapterForm, UploadForm, UploadRoom, UploadSpool, check_form, declared_bytes, receive_upload

# What of an adapter's tokenizer is served with it, and what its tenant should know of the rest.

MAX_OWN_TOKENS: Final = 1024  # of an adapter, beside the base's
_OTHER_TEMPLATE: Final = (
    "the adapter's chat template is not the base's, which renders its chats here: if it was trained on chats in "
    "another form, send its template with the upload, in the part chat_template"
)


def own_text_of(form: UploadForm, text: TextService, vocab_size: int) -> OwnText:
    """What is not as the base's `text` has it. `vocab_size`: rows of the base's embedding.

    Raises AdapterInvalid for tokens that the adapter cannot have.
    """
    tokenizer = form.tokenizer
    added = tokenizer.added_tokens.items()
    by_id: dict[int, str] = {}
    for token, number in added:
        if (other := by_id.setdefault(number, token)) != token:
            raise AdapterInvalid(
                f"the adapter's tokenizer has {quote(other)} and {quote(token)} under one id, {number}: save it again "
                "as transformers loads it. If the adapter was trained without these tokens, remove the tokenizer's "
                "files from its folder"
            )
    differing = {token: number for token, number in added if not text.is_added(token, number)}
    for token, number in differing.items():
        if (id_in_base := text.token_id(token)) not in (None, number):
            raise AdapterInvalid(
                f"the adapter's tokenizer has {quote(token)} under the id {number}, and the base's under {id_in_base}: "
                "train the adapter with the base's tokenizer. If it was trained without this token already, remove the "
                "tokenizer's files from its folder"
            )
        if number >= vocab_size:
            raise AdapterInvalid(
                f"the adapter's tokenizer adds {quote(token)} with the id {number}, and the base's embedding has "
                f"{vocab_size} rows: tokens behind it are not served. Train with tokens that the base reserves, such "
                "as those named reserved or unused. If the adapter was trained without this one already, remove the "
                "tokenizer's files from its folder"
            )
    if len(differing) > MAX_OWN_TOKENS:
        raise AdapterInvalid(
            f"the adapter's tokenizer adds {len(differing)} tokens: at most {MAX_OWN_TOKENS} are served"
        )
    tokens = [OwnToken(number, token, tokenizer.flags.get(token, ())) for token, number in differing.items()]
    end, of_base = tokenizer.end_token, text.special_tokens
    is_end_of_base = end == of_base.get("eos_token") or (end not in differing and text.token_id(end) is None)
    template = form.chat_template
    special = {name: token for name, token in tokenizer.special_tokens.items() if token != of_base.get(name)}
    special = {name: token for name, token in sorted(special.items()) if name in template}
    if template_digest(template) == text.template_digest and is_end_of_base and not special:
        template = ""
    return OwnText(template, (*sorted(tokens, key=lambda token: token.id),), "" if is_end_of_base else end, special)


def own_text_warnings(own_text: OwnText, form: UploadForm, text: TextService) -> tuple[str, ...]:
    """What its tenant should know."""
    differs = form.tokenizer.chat_template and form.tokenizer.chat_template != text.template_digest
    return (_OTHER_TEMPLATE,) if differs and not own_text.chat_template else ()


def untrained_tokens(own_text: OwnText, untrained_ids: Collection[int], text: TextService) -> tuple[str, ...]:
    """Of tokens of its own that the adapter has not trained, though the base's tokenizer does not know them."""
    tokens = (token for token in own_text.tokens if token.id in untrained_ids)
    if not (new := [token.text for token in tokens if text.token_id(token.text) is None]):
        return ()
    return (
        f"the adapter's tokenizer adds {listed(new)}, and the adapter does not change their embedding: these rows are "
        "the base's, which may be untrained",
    )


def invocation_warnings(token_ids: Sequence[int], own_text: OwnText, text: TextService) -> tuple[str, ...]:
    """Of an activated LoRA that no text invokes."""
    of_adapter = {token.id for token in own_text.tokens}
    missing = [str(each) for each in token_ids if each not in of_adapter and not text.token_str(each)]
    if not missing:
        return ()
    return (
        f"alora_invocation_tokens has {listed(missing)}, which are not tokens of its tokenizer: no text invokes "
        "the adapter, and the base answers. Train it with an invocation as this tokenizer encodes it",
    )


MAX_WAITING_UPLOADS: Final = 64  # of a tenant at a router, running ones included: each holds a connection
_name: Final = attrgetter("name")
_FLOAT32_GROWTH: Final = 2  # of tensors that were uploaded in 16 bits
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A name's current version."""

    name: str
    version: int
    digest: str  # SHA-256 of what it computes
    rank: int
    targets: tuple[str, ...]
    bytes: int  # of the tensors as uploaded
    packed_bytes: int  # that it takes in a gang's memory; 0: from before this was recorded
    created_at: int  # Unix time, seconds
    response_template: str = ""  # name of its format of calls and reasoning; empty: that of the base
    own_text: str = ""  # SHA-256 of its own chat template, tokens and end of answers; empty: all are the base's
    invocation_token_ids: tuple[int, ...] = ()  # of an activated LoRA, after which it computes; empty: a plain one
    num_labels: int = 0  # of a sequence classifier; 0: it is none
    warnings: tuple[str, ...] = ()  # why its answers may differ from those in training
    object: Literal["adapter"] = "adapter"


class CombinedPart(msgspec.Struct, frozen=True, kw_only=True):
    adapter: Annotated[str, Meta(max_length=256, description="Its name, `name@version` or `name@alias`.")]
    weight: Annotated[float, Meta(description="Of what it adds; below 0 it is taken away.")] = 1.0


class CombinationBody(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(max_length=256, description="Of the new version.")]
    adapters: Annotated[list[CombinedPart], Meta(min_length=1, max_length=MAX_PARTS)]
    combination_type: CombinationType = "cat"
    density: Annotated[float | None, Meta(description="The share of the numbers that pruning keeps.")] = None
    majority_sign_method: MajoritySign = "total"
    svd_rank: Annotated[int | None, Meta(description="Of `svd`; else the largest of the parts' ranks.")] = None
    note: Annotated[str, Meta(max_length=MAX_NOTE_CHARS)] = ""
    activate: bool = True
    private: Annotated[
        bool | None, Meta(description="It is the user's alone; by default it is where one of the adapters is.")
    ] = None


class DeletedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True


class AdaptersApi:
    """Handlers of a tenant's adapters. They read the registry itself and not this router's copy of it."""

    UPLOAD_ERRORS: Final = (
        "invalid_adapter",
        "version_refused",
        "rate_limit_exceeded",
        "insufficient_quota",
        "too_large",
        "uploads_full",
        "upload_unchecked",
        "registry_unavailable",
        "insufficient_storage",
    )

    def __init__(
        self,
        config: CurrentConfig,
        uploads: UploadService,
        metrics: Metrics,
        text: TextService,
        base_names: Sequence[str],
        texts: AdapterTexts,
        quotas: Quotas | None = None,
    ) -> None:
        """`quotas`: None: there are none."""
        self._config = config
        self._metrics = metrics
        self._text, self._texts = text, texts
        self._base_names = tuple(base_names)
        self._quotas = quotas
        self._uploads = uploads
        self._spool = UploadSpool(config.now.spool_path, config.now.min_free_bytes)
        self._open_uploads = TenantPlaces(config.now.max_open_uploads, config.now.max_tenant_uploads)

    @route(
        "POST",
        "/v1/adapters",
        scope="upload",
        summary="Upload an adapter.",
        form=AdapterForm,
        answers={200: Adapter, 201: Adapter},
        errors=UPLOAD_ERRORS,
    )
    async def upload(self, request: Request, identity: Identity) -> Response:
        """201 for a new version, 200 for content that the name already points to."""
        receive, declared = partial(self._receive, request), partial(self._declared_bytes, request)
        adapter, created, warnings = await self.take(request, identity, receive, declared)
        answer = structs.replace(self._view_of(adapter), warnings=warnings)
        return Response(msgspec.json.encode(answer), 201 if created else 200, media_type="application/json")

    @route(
        "POST",
        "/v1/adapter_combinations",
        scope="upload",
        summary="Make an adapter of several, with weights.",
        answers={200: Adapter, 201: Adapter},
        errors=("adapter_not_found", "version_not_found", *UPLOAD_ERRORS),
    )
    async def combine(self, request: Request, identity: Identity, body: CombinationBody) -> Response:
        """As PEFT's `add_weighted_adapter`. The new version stays when its parts go. It counts as an upload."""
        parts = [await self._part(identity, part.adapter) for part in body.adapters]
        bases = {part.base for part in parts}
        foreign = sorted(base for base in bases if self._base_warnings(base))
        if len({(part.response_template, part.own_text) for part in parts}) > 1:
            message = "they have different response templates or chat templates, or tokens: combine those of one form."
            raise invalid_value("adapters", message)
        combination = Combination(
            parts=tuple(
                WeightedAdapter(part.digest, each.weight) for part, each in zip(parts, body.adapters, strict=True)
            ),
            combination_type=body.combination_type,
            density=body.density,
            majority_sign_method=body.majority_sign_method,
            svd_rank=body.svd_rank,
            # Packed, what modules share is there for each, and each factor of VeRA, LoHa and LoKr as its product.
            num_bytes=sum(max(part.num_bytes, part.packed_bytes) for part in parts),
            base=foreign[0] if foreign else bases.pop() if len(bases) == 1 else "",
        )
        if problem := combination_problem(combination):
            raise invalid_value("adapters", f"{problem}.")

        is_private = any(owner_of(part.name) for part in parts) if body.private is None else body.private

        async def receive(tensors_path: Path, room: UploadRoom) -> UploadForm:
            room.grow(_FLOAT32_GROWTH * combination.num_bytes)
            return UploadForm(
                body.name,
                combination,
                note=body.note,
                activate=body.activate,
                is_private=is_private,
                response_template=parts[0].response_template,
                own_text=await self._uploads.own_text(parts[0]),
            )

        adapter, created, warnings = await self.take(request, identity, receive)
        answer = structs.replace(self._view_of(adapter), warnings=warnings)
        return Response(msgspec.json.encode(answer), 201 if created else 200, media_type="application/json")

    async def _part(self, identity: Identity, model: str) -> AdapterVersion:
        """The version that the caller means. Raises NoSuchName, NoSuchVersion, RegistryUnavailable."""
        name, selector = split_selector(model)
        if selector is None:
            adapter = await self._uploads.get(identity.name, name, identity.sight)
            if adapter is None:
                raise _not_found(name)
            return adapter
        return (await self._uploads.state(identity.name, name, identity.sight)).find(selector)

    async def take(
        self,
        request: Request,
        identity: Identity,
        receive: Callable[[Path, UploadRoom], Awaitable[UploadForm]],
        declared: Callable[[], int] = lambda: 0,
    ) -> tuple[AdapterVersion, bool, tuple[str, ...]]:
        """The version, whether it is new, and warnings. Raises the errors of the API, and NameTaken.

        `receive`: writes the tensors to a file. `declared`: their declared size in bytes, or the refusal.
        """
        started_at = time.perf_counter()
        tenant = identity.name
        if self._open_uploads.num_here(tenant) >= MAX_WAITING_UPLOADS:
            raise too_many_uploads()
        if self._quotas is not None:
            await self._quotas.take_upload(identity)
        # Held until the adapter is stored, because until then the spool uses the disk.
        async with self._open_uploads.of(tenant):
            try:
                outcome = await self._take(request, identity, receive, declared)
            except (AdapterInvalid, AdapterCorrupt) as error:  # corrupt: a part of a combination
                raise ApiError(400, str(error), code="invalid_adapter") from error
            except StoreUnavailable as error:
                raise UploadUnchecked(str(error)) from error
            except VersionRefused as error:
                raise ApiError(409, str(error), param="activate", code="version_refused") from error
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                raise _disk_full() from error
        adapter = outcome[0]
        record_of(request.scope).model = adapter.name
        self._metrics.upload_s.observe(time.perf_counter() - started_at)
        self._metrics.num_upload_bytes += adapter.num_bytes
        return outcome

    async def has(self, identity: Identity, name: str) -> bool:
        """Raises RegistryUnavailable."""
        return await self._uploads.get(identity.name, name, identity.sight) is not None

    def _declared_bytes(self, request: Request) -> int:
        check_form(request, self._config.now.max_upload_bytes)
        return declared_bytes(request) or 0

    async def _receive(self, request: Request, tensors_path: Path, room: UploadRoom) -> UploadForm:
        config = self._config.now
        pace = ArrivalPace(config.upload_idle_s, config.upload_bytes_per_s, config.upload_deadline_s)
        return await receive_upload(request, tensors_path, config.max_upload_bytes, config.upload_idle_s, pace, room)

    async def _take(
        self,
        request: Request,
        identity: Identity,
        receive: Callable[[Path, UploadRoom], Awaitable[UploadForm]],
        declared: Callable[[], int],
    ) -> tuple[AdapterVersion, bool, tuple[str, ...]]:
        with self._spool.room(declared()) as room, self._spool.file() as tensors_path:
            form = await receive(tensors_path, room)
            name = identity.sight.uploaded(form.name, is_private=form.is_private)
            user = owner_of(name) or identity.user
            own_text = form.own_text or own_text_of(form, self._text, self._uploads.vocab_size)
            warnings = own_text_warnings(own_text, form, self._text)
            if own_text != NO_OWN_TEXT:
                await self._texts.check(identity.name, own_text)
            problems: list[str] = []  # with the base that the adapter names, its LoRA of vision, its config

            def check(upload: CheckedUpload) -> None:
                problems.extend(self._base_warnings(upload.base))
                if problems and self._config.now.adapter_base == "match":
                    raise AdapterInvalid(problems[0])
                if upload.left_out and self._config.now.vision_lora == "refuse":
                    raise AdapterInvalid(upload.left_out)
                if upload.unknown_field and self._config.now.unknown_adapter_fields == "refuse":
                    raise AdapterInvalid(
                        f"{upload.unknown_field}. An operator lets such fields pass: --unknown-adapter-fields warn"
                    )
                problems.extend([f"left out: {upload.left_out}"] if upload.left_out else [])
                problems.extend([upload.unknown_field] if upload.unknown_field else [])
                problems.extend(upload.warnings)
                problems.extend(invocation_warnings(upload.invocation_token_ids, own_text, self._text))
                problems.extend(untrained_tokens(own_text, upload.untrained_token_ids, self._text))

            try:
                adapter, created = await self._uploads.upload(
                    identity.name,
                    name,
                    form.config,
                    tensors_path,
                    response_template=form.response_template,
                    own_text=own_text,
                    activate=form.activate,
                    must_be_new=form.must_be_new,
                    note=VersionNote(form.note, identity.key.key_id, user),
                    admission=identity.admission,
                    entry=identity.entry(request, "adapter.upload", name),
                    bounds=storage_bounds(identity.tenant, identity.key, user),
                    take_room=room.pack,
                    check=check,
                )
            except CallerGone as error:
                if user == identity.user:
                    raise
                message = f"the user {user} was deleted meanwhile: upload it again if it is for the next one"
                raise AdapterInvalid(message) from error
        return adapter, created, (*warnings, *problems)

    @route(
        "GET",
        "/v1/adapters",
        scope="upload",
        summary="List your adapters.",
        query=PAGE_QUERY,
        answers={200: ListPage[Adapter]},
        errors=("registry_unavailable",),
    )
    async def list(self, request: Request, identity: Identity) -> Response:
        """By name."""
        list_page = partial(self._uploads.list_page, identity.name, sight=identity.sight)
        adapters, more = await read_page(list_page, _name, page_request(request))
        return await list_answer(map(self._view_of, adapters), [*map(_name, adapters)], more)

    @route(
        "GET",
        "/v1/adapters/{name}",
        scope="upload",
        summary="Show an adapter.",
        errors=("adapter_not_found", "registry_unavailable"),
    )
    async def show(self, request: Request, identity: Identity) -> Adapter:
        """The version that requests with its name get now."""
        name = request.path_params["name"]
        adapter = await self._uploads.get(identity.name, name, identity.sight)
        if adapter is None:
            raise _not_found(name)
        record_of(request.scope).model = adapter.name
        return self._view_of(adapter)

    @route(
        "DELETE",
        "/v1/adapters/{name}",
        scope="upload",
        summary="Delete an adapter.",
        errors=("adapter_not_found", "registry_unavailable"),
    )
    async def delete(self, request: Request, identity: Identity) -> DeletedAdapter:
        """Running requests are completed with it."""
        return DeletedAdapter(name=await self.remove(request, identity, request.path_params["name"]))

    async def remove(self, request: Request, identity: Identity, name: str) -> str:
        """Returns the registered name. Raises NoSuchName, RegistryUnavailable."""
        entry = identity.entry(request, "adapter.delete", name)
        deleted = await self._uploads.delete(identity.name, name, entry, identity.sight, identity.admission)
        if deleted is None:
            raise _not_found(name)
        record_of(request.scope).model = deleted
        return deleted

    def _base_warnings(self, base: str) -> tuple[str, ...]:
        """Problems with the base that an adapter names."""
        config = self._config.now
        if config.adapter_base == "any":
            return ()
        names = BaseNames((config.model_name, *self._base_names, *config.base_aliases.split(",")))
        problem = names.mismatch(base)
        return () if problem is None else (problem,)

    def _view_of(self, adapter: AdapterVersion) -> Adapter:
        return Adapter(
            name=adapter.name,
            version=adapter.version,
            digest=adapter.digest,
            rank=adapter.rank,
            targets=adapter.targets,
            bytes=adapter.num_bytes,
            packed_bytes=adapter.packed_bytes,
            created_at=int(adapter.created_at),
            response_template=adapter.response_template,
            own_text=adapter.own_text,
            invocation_token_ids=adapter.invocation_token_ids,
            num_labels=adapter.num_labels,
            warnings=self._base_warnings(adapter.base),
        )


def _not_found(name: str) -> NoSuchName:
    return NoSuchName(f"The adapter `{name}` does not exist.")


def _disk_full() -> ApiError:
    message = (
        "The server's disk is too full for this adapter, which was not stored: free some space, then upload it again."
    )
    return ApiError(507, message, code="insufficient_storage")


def too_many_uploads() -> ApiError:
    message = f"{MAX_WAITING_UPLOADS} of your uploads are running or waiting: try again later."
    headers = {"Retry-After": "10", "Connection": "close"}
    return ApiError(429, message, code="uploads_full", headers=headers)
