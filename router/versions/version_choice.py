"""Which version of an adapter answers a request, and which ones a resumed stream may have begun with."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from ...adapters.adapter import AdapterVersion
from ...adapters.registry.versions.canary_choice import gets_canary
from ...adapters.registry.versions.rollout import rollout_of, selected, version_of, versions_of
from ..openai_api.errors import model_not_found
from ..openai_api.request_schema import ChatRequest, CompletionRequest, GenerationFields
from ..tenants.identity import Identity

VERSION_HEADER: Final = b"x-motet-version"
_encode = msgspec.msgpack.Encoder().encode


def answering(current: AdapterVersion, request: GenerationFields, identity: Identity) -> Sequence[AdapterVersion]:
    """The version that answers the request; behind it the name's others, with which a resumed stream may have begun.

    `name@…` means what it says; the name alone means the current version, or its canary. Raises 404.
    """
    _, is_selected, selector = request.model.partition("@")
    first: AdapterVersion | None = current
    if is_selected:
        first = selected(current, selector)
    elif current.rollout:
        canary = rollout_of(current).canary
        if canary is not None and gets_canary(canary.share, sticky_key(request, identity), canary.id):
            first = version_of(current, canary.version)
    if first is None:
        raise model_not_found(request.model)
    if not current.rollout:
        return [first]
    return [first, *(other for other in versions_of(current) if other.version != first.version)]


def key_in_trial(versions: Sequence[AdapterVersion | None], request: GenerationFields, identity: Identity) -> str:
    """The sticky key of a request for a name that has a canary; empty: it has none. `versions`: see `answering`."""
    current = next((one for one in versions if one is not None and one.rollout), None)
    if current is None or rollout_of(current).canary is None:
        return ""
    return sticky_key(request, identity)


def sticky_key(request: GenerationFields, identity: Identity) -> str:
    """What stays the same while somebody's requests belong together: `user`, else the conversation, else the API key.

    A chat's conversation is all up to its first message from the user; a completion's is the whole first prompt.
    """
    if request.user:
        return f"user {request.user}"
    beginning: object = None
    if isinstance(request, ChatRequest):
        places = [place for place, message in enumerate(request.messages) if message.role == "user"]
        beginning = request.messages[: places[0] + 1] if places else None
    elif isinstance(request, CompletionRequest):
        beginning = request.prompt if isinstance(request.prompt, str) else request.prompt[:1]
    if beginning is None:
        return f"key {identity.key.key_id}"
    return f"talk {blake2b(_encode(beginning), digest_size=16).hexdigest()}"


def version_header(version: AdapterVersion) -> tuple[bytes, bytes]:
    """Says which version has answered."""
    return VERSION_HEADER, f"{version.name}@{version.version}".encode()
