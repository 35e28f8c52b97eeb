"""What a request's model means: the base, or an adapter, and which version of it answers.

It is decided once, and carried to all that depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import msgspec

from ...adapters.adapter import AdapterVersion
from ...adapters.names import owner_of, split_selector
from ...adapters.registry.canary_counts import TrialMember
from ...adapters.registry.registry_view import RegistryView
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
from ...workers.wire.messages import AdapterRef, GangInfo
from ..classification import ClassifyPrompts
from ..config import CurrentConfig
from ..fleet.dispatch import Dispatcher, probe
from ..generation.generation import GenerationRequest
from ..http.auth import Identity
from ..http.errors import model_not_found, unavailable
from ..openai.request_schema import ChatRequest, CompletionRequest, GenerationFields

VERSION_HEADER: Final = b"x-motet-version"
_encode = msgspec.msgpack.Encoder().encode


# The base model that this router serves: its limits, and which names in requests mean it or an adapter of it.


class BaseModel:
    """Keeps the facts of the last gang, so that requests can be checked while gangs are replaced."""

    def __init__(self, config: CurrentConfig, dispatcher: Dispatcher, view: RegistryView) -> None:
        self.name = config.now.model_name
        self._config = config
        self._first_gang = asyncio.Lock()  # requests that wait for the first gang share one probe
        self._dispatcher = dispatcher
        self._view = view
        self._last_gang: GangInfo | None = None

    def known_gang(self) -> GangInfo | None:
        """Facts of a connected gang, else of the last gang that was connected; None: there has been none."""
        self._last_gang = self._dispatcher.gang() or self._last_gang
        return self._last_gang

    async def gang(self) -> GangInfo:
        """`known_gang`, but raises 503 if no gang has ever been connected.

        Where gangs scale from zero it makes one start first, and waits for it.
        """
        if self._config.now.scales_from_zero and self.known_gang() is None:
            async with self._first_gang:
                if self.known_gang() is None:
                    problem = await probe(self._dispatcher)
                    if problem is not None:
                        raise unavailable(f"No gang of workers is connected yet: {problem}.", "gang_lost")
        gang = self.known_gang()
        if gang is None:
            raise unavailable("No gang of workers is connected yet, try again.", "gang_lost")
        return gang

    async def adapter(self, identity: Identity, model: str) -> AdapterVersion | None:
        """The current version of the adapter that a request's `model` names, `name` or `name@…`; None: the base itself.

        An alias of the base is the base unless the caller has an adapter of that name.
        Raises 404 for a name that the caller does not see; a version or alias after an @ is ignored.
        Raises RegistryUnavailable for an adapter that this router does not keep in memory while Redis is away.
        """
        if model == self.name:
            return None
        name, _ = split_selector(model)
        current = await self._view.resolve(identity.name, name, identity.sight)
        if current is None:
            aliases = {alias.strip() for alias in self._config.now.base_aliases.split(",")} - {""}
            if model not in aliases:
                raise model_not_found(model)
        return current


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

    def renderings(self) -> list[AdapterVersion | None]:
        """Of the candidates the first with each pair of templates: by others a resumed stream has other prompts."""
        first: dict[tuple[str, str], AdapterVersion | None] = {}
        for candidate in self.candidates():
            first.setdefault(templates_of(candidate), candidate)
        return [*first.values()]

    def with_version(self, version: AdapterVersion | None) -> VersionChoice:
        return self if version is self.version else replace(self, version=version)


def templates_of(version: AdapterVersion | None) -> tuple[str, str]:
    """How its texts are written, and its answers read."""
    return ("", "") if version is None else (version.own_text, version.response_template)


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
    if isinstance(request, CompletionRequest | ClassifyPrompts) and request.prompt:
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
    return AdapterRef(version.digest, dict(version.module_ranks), version.invocation_token_ids)
