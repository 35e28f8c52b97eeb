"""What a name's record holds beside its current version: its other versions, and which requests get which of them.

It is part of the record and of each of its events, so that a copy of the record knows every version. It is kept as
JSON, which is small, and decoded for names that are in use: most names have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec

from ...adapter import AdapterVersion

MAX_VERSIONS: Final = 10  # of a name, beside those that are pointed to: the oldest go first
MAX_ALIASES: Final = 8  # of a name
MAX_CANARIES: Final = 64  # of a tenant, that run at once
MAX_PINNED_GANGS: Final = 16  # of a name
MAX_PINS: Final = 256  # names of a tenant that are pinned
MAX_PINS_IN_ALL: Final = 10_000  # which routers keep and send to gangs


class VersionFacts(msgspec.Struct, frozen=True, array_like=True):
    """A version that is not the name's current one."""

    version: int
    digest: str
    num_bytes: int
    created_at: float
    module_ranks: Mapping[str, int]
    packed_bytes: int = 0
    base: str = ""
    response_template: str = ""


class Canary(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version on trial: a share of the requests for the name goes to it."""

    id: str  # of this trial: another trial chooses other requests
    version: int
    share: float  # above 0, below 1
    started_at: float = 0.0  # Unix time, seconds


class Shadow(msgspec.Struct, frozen=True):
    """A version that a share of the requests for the name is sent to as well, and whose answers are discarded."""

    id: str
    version: int
    share: float  # above 0, at most 1


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    others: tuple[VersionFacts, ...] = ()  # by version
    invocations: Mapping[int, tuple[int, ...]] = {}  # token ids, of those of `others` that are activated LoRA
    own_texts: Mapping[int, str] = msgspec.field(default={}, name="templates")  # of `others`, where they have one
    labels: Mapping[int, int] = {}  # their number, of those of `others` that have score heads
    previous: tuple[int, ...] = ()  # versions that were current before, the newest last
    aliases: Mapping[str, int] = {}
    canary: Canary | None = None
    shadow: Shadow | None = None
    pinned_gangs: int = 0  # that keep the current version in host memory; 0: it is not pinned

    def pointed_to(self) -> set[int]:
        """Numbers of the versions beside the current one that must be kept."""
        trials = (self.canary, self.shadow)
        return {*self.aliases.values(), *(trial.version for trial in trials if trial is not None)}

    def digests_in_use(self) -> set[str]:
        """Digests of versions beside the current one that aliases, a canary or a shadow use."""
        used = self.pointed_to()
        return {facts.digest for facts in self.others if facts.version in used}

    def json(self) -> bytes:
        """As JSON; empty for `NOTHING`."""
        return b"" if self == NOTHING else _encode(self)


NOTHING: Final = Rollout()
_encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(Rollout)
_MAX_DECODED: Final = 4096  # records, of some 6 KB each: more than are in use at once in a router


@lru_cache(_MAX_DECODED)
def _decode(rollout: bytes) -> Rollout:
    """Routers ask it at every request of a name, whose record changes seldom."""
    return _decoder.decode(rollout)


def rollout_of(current: AdapterVersion) -> Rollout:
    """What the record that a current version was read from says."""
    return _decode(current.rollout) if current.rollout else NOTHING


def with_others(rollout: Rollout, versions: Iterable[VersionFacts], addition: AdapterVersion | None = None) -> Rollout:
    """With these versions, and `addition`, beside the current one."""
    invocations, own_texts, labels = {**rollout.invocations}, {**rollout.own_texts}, {**rollout.labels}
    if addition is not None:
        versions = (*versions, facts_of(addition))
        invocations[addition.version] = addition.invocation_token_ids
        own_texts[addition.version] = addition.own_text
        labels[addition.version] = addition.num_labels
    by_number = sorted(versions, key=lambda facts: facts.version)
    numbers = {facts.version for facts in by_number}
    return msgspec.structs.replace(
        rollout,
        others=tuple(by_number),
        invocations={version: ids for version, ids in invocations.items() if version in numbers and ids},
        own_texts={version: digest for version, digest in own_texts.items() if version in numbers and digest},
        labels={version: number for version, number in labels.items() if version in numbers and number},
    )


def facts_of(adapter: AdapterVersion) -> VersionFacts:
    return VersionFacts(
        adapter.version,
        adapter.digest,
        adapter.num_bytes,
        adapter.created_at,
        adapter.module_ranks,
        adapter.packed_bytes,
        adapter.base,
        adapter.response_template,
    )


def version_of(current: AdapterVersion, version: int) -> AdapterVersion | None:
    """A version of the same name; None: it has no such version, or no more."""
    if version == current.version:
        return current
    facts = next((facts for facts in rollout_of(current).others if facts.version == version), None)
    return None if facts is None else _adapter(current, facts)


def selected(current: AdapterVersion, selector: str) -> AdapterVersion | None:
    """The version that stands behind the @ in `name@3` or `name@prod`; None: there is none."""
    if selector.isascii() and selector.isdigit() and len(selector) < 16:
        return version_of(current, int(selector)) if str(int(selector)) == selector else None
    version = rollout_of(current).aliases.get(selector)
    return None if version is None else version_of(current, version)


def versions_of(current: AdapterVersion) -> Iterator[AdapterVersion]:
    """All versions of the name, the newest first."""
    facts = sorted((*rollout_of(current).others, facts_of(current)), key=lambda entry: -entry.version)
    return (current if entry.version == current.version else _adapter(current, entry) for entry in facts)


def _adapter(current: AdapterVersion, facts: VersionFacts) -> AdapterVersion:
    return AdapterVersion(
        tenant=current.tenant,
        name=current.name,
        version=facts.version,
        digest=facts.digest,
        module_ranks=facts.module_ranks,
        num_bytes=facts.num_bytes,
        created_at=facts.created_at,
        packed_bytes=facts.packed_bytes,
        base=facts.base,
        response_template=facts.response_template,
        invocation_token_ids=rollout_of(current).invocations.get(facts.version, ()),
        own_text=rollout_of(current).own_texts.get(facts.version, ""),
        num_labels=rollout_of(current).labels.get(facts.version, 0),
        revision=current.revision,
    )


# Which requests get a canary: a pure function, so that every router decides alike, at any time.


def canary_place(sticky_key: str, canary_id: str) -> bytes:
    """The key's place among all keys, 8 bytes: each canary gives all keys other places."""
    return blake2b(f"{canary_id}:{sticky_key}".encode(), digest_size=8).digest()


def is_below(place: bytes, share: float) -> bool:
    """Whether a place is within the first `share` of all, 0 to 1: a larger share only adds keys."""
    return int.from_bytes(place) < share * 2.0**64


def gets_canary(share: float, sticky_key: str, canary_id: str) -> bool:
    """Whether requests with this key go to the canary, which gets this share of all keys."""
    return is_below(canary_place(sticky_key, canary_id), share)
