"""Which version of an adapter answers a request. It is decided once, and carried to all that depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import msgspec

from ...adapters.adapter import AdapterVersion
from ...adapters.names import owner_of, split_selector
from ...adapters.registry.canary_counts import TrialMember
from ...adapters.registry.versions.rollout import (
    Canary,
    Shadow,
    canary_place,
    is_below,
    rollout_of,
    selected,
    version_of,
    versions_of,
)
from ...workers.wire.messages import AdapterRef
from ..generation.generation import GenerationRequest
from ..http.auth import Identity
from ..http.errors import model_not_found
from ..openai.request_schema import ChatRequest, CompletionRequest, GenerationFields

VERSION_HEADER: Final = b"x-motet-version"
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """The version that answers, and the trials that the answer takes part in: none if the request names a version."""

    version: AdapterVersion | None = None  # None: the base
    current: AdapterVersion | None = None  # of the name that was requested; None: the base
    canary: Canary | None = None
    canary_place: bytes = b""  # of the request, among those of which the canary gets a share
    shadow: Shadow | None = None

    @property
    def trial(self) -> TrialMember | None:
        """The canary's trial in which the answer counts."""
        if self.canary is None or self.version is None or self.current is None:
            return None
        if self.version.version not in (self.canary.version, self.current.version):
            return None  # a resumed stream, that began with a version that is on trial no more
        is_canary = self.version.version == self.canary.version
        return TrialMember(self.canary.id, "canary" if is_canary else "stable", self.canary_place.hex())

    def candidates(self) -> Iterator[AdapterVersion | None]:
        """The version that answers; then the name's others, with which a resumed stream may have begun."""
        yield self.version
        if self.version is not None and self.current is not None and self.current.rollout:
            yield from (other for other in versions_of(self.current) if other.version != self.version.version)

    def with_version(self, version: AdapterVersion | None) -> VersionChoice:
        return self if version is self.version else replace(self, version=version)


def choose_version(current: AdapterVersion | None, request: GenerationFields, identity: Identity) -> VersionChoice:
    """`current`: of the name in the request's model; None: the model is the base.

    `name@…` means that version; the name alone means the current version, or its canary. Raises 404.
    """
    if current is None:
        return VersionChoice()
    _, selector = split_selector(request.model)
    if selector is not None:
        return VersionChoice(_existing(selected(current, selector), request), current)
    if not current.rollout:
        return VersionChoice(current, current)
    rollout = rollout_of(current)
    canary = rollout.canary
    if canary is None:
        return VersionChoice(current, current, shadow=rollout.shadow)
    place = canary_place(sticky_key(request, identity), canary.id)
    version = version_of(current, canary.version) if is_below(place, canary.share) else current
    return VersionChoice(_existing(version, request), current, canary, place, rollout.shadow)


def _existing(version: AdapterVersion | None, request: GenerationFields) -> AdapterVersion:
    if version is None:
        raise model_not_found(request.model)
    return version


def sticky_key(request: GenerationFields, identity: Identity) -> str:
    """What requests that belong together have in common: `user`, else the conversation, else the API key.

    A chat's conversation is all up to its first message from the user; a completion's is the whole first prompt.
    """
    if request.user:
        return f"user {request.user}"
    beginning: object = None
    if isinstance(request, ChatRequest):
        first = next((index for index, message in enumerate(request.messages) if message.role == "user"), None)
        beginning = None if first is None else request.messages[: first + 1]
    elif isinstance(request, CompletionRequest):
        beginning = request.prompt if isinstance(request.prompt, str) else request.prompt[:1]
    if beginning is None:
        return f"key {identity.key.key_id}"
    return f"talk {blake2b(_encode(beginning), digest_size=16).hexdigest()}"


def on_adapter(generation: GenerationRequest, version: AdapterVersion, model: str) -> GenerationRequest:
    """The generation with this version. `model`: its name in the request.

    A private adapter shares no KV with others of the same content, and metrics do not name it.
    """
    owner = owner_of(version.name)
    salt = generation.cache_salt
    return replace(
        generation,
        adapter=adapter_ref(version),
        adapter_name="" if owner else model,
        owner=owner,
        # Of no tenant's own KV: its salts have digits and a colon first, and a user's name has no slash.
        cache_salt=f"~{owner}/{salt}" if owner else salt,
    )


def adapter_ref(version: AdapterVersion) -> AdapterRef:
    return AdapterRef(version.digest, dict(version.module_ranks))


def version_header(version: AdapterVersion) -> tuple[bytes, bytes]:
    """The answer's header with the version that answered."""
    return VERSION_HEADER, f"{version.name}@{version.version}".encode()
