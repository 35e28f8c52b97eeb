"""One answer in the ledger, and how several entries of one id are merged.

An id is counted once, however many entries of it there are, in whatever order they come. The entry that knows most of
the end (`Stage`) decides how the answer ended. What the answer has cost only grows, so the largest of each such number
counts. So a router may write how far an answer has come, and die; another one may write the end; and an entry may be
sent again if it is not known whether it arrived.

What gangs compute again where a client resumes its stream is not the answer's cost, and adds up. So each attempt to
resume it has an entry of its own, with an id of its own, that counts nothing but `computed_tokens`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from ..tenants.records import make_tenant_id

# The counts of an entry, in their order in Redis. New ones are added at the end.
NUMBERS: Final = (
    "requests",
    "cut_off",  # of these, answers whose client did not receive the end
    "prompt_tokens",
    "cached_tokens",  # of prompt_tokens, found in the cache
    "output_tokens",
    "kv_device_page_ms",  # pages of KV that sequences held, times milliseconds
    "adapter_device_page_ms",  # the same for their parts of the adapters' pages
    "recomputed_tokens",  # of one connection, computed again after a preemption or by another gang: never charged
    "computed_tokens",  # all: charged ones, and those that were computed again. 0 in records of earlier versions
)
NUM_DIGEST_DIGITS: Final = 12  # of a digest in sums: the version number already distinguishes versions of a name


class Stage(IntEnum):
    """How complete the writer's view of the answer was."""

    UNDER_WAY = 0
    CUT_OFF = 1  # its client left or got an error
    COMPLETE = 2


class Group(msgspec.Struct, frozen=True, order=True):
    """The group of a sum, besides the tenant and the time."""

    key_id: str
    adapter: str  # its name, or the base's
    version: int  # 0: the base
    digest: str  # its first digits; empty: the base
    user: str = ""  # of the tenant; empty: the key had no user

    def __str__(self) -> str:
        return f"{_prefix(self.user)}{self.key_id}\t{self.adapter}\t{self.version}\t{self.digest}"


# The group for further usage when a tenant has used more groups on a day than are kept. Before that, further users
# are counted together by adapter (without_user.lua), as a user and key of this name.
OTHERS: Final = Group("(other)", "(other)", 0, "")
OTHER_USERS: Final = "(other)"  # not a valid name of a user


def parse_group(text: str) -> Group:
    """A group as `str` writes it, where the user's name is in front if there is one.

    >>> parse_group("key\\tsql\\t3\\tab12")
    Group(key_id='key', adapter='sql', version=3, digest='ab12', user='')
    """
    *user, key_id, adapter, version, digest = text.split("\t")
    return Group(key_id, adapter, int(version), digest, *user)


def _prefix(user: str) -> str:
    """A group without a user is written as it was before users existed."""
    return f"{user}\t" if user else ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the writer knew about the answer."""

    id: str  # of the response
    tenant: str
    num_ended: int = 0  # the tenant's incarnation
    began_at: int  # Unix time, seconds; the same in all entries of an id: it is counted in this hour and on this day
    stage: Stage = Stage.UNDER_WAY
    key_id: str = ""
    user: str = ""
    adapter: str = ""
    version: int = 0
    digest: str = ""
    error: str = ""  # the error code that the client got
    requests: int = 0
    cut_off: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kv_device_page_ms: int = 0
    adapter_device_page_ms: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0

    @property
    def tenant_id(self) -> str:
        """The id under which it is counted, since the tenant's name may have a new owner by now."""
        return make_tenant_id(self.tenant, self.num_ended)

    @property
    def group(self) -> Group:
        return Group(self.key_id, self.adapter, self.version, self.digest[:NUM_DIGEST_DIGITS], self.user)

    @property
    def full_group(self) -> str:
        """The group as text, with the whole digest."""
        return f"{_prefix(self.user)}{self.key_id}\t{self.adapter}\t{self.version}\t{self.digest}"

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple([getattr(self, name) for name in NUMBERS])


def merged(record: Entry, other: Entry) -> Entry:
    """Merges two entries of one id. Associative, commutative and idempotent.

    Each position of the prompt is charged once. So what is cached is what no entry has computed: a stream that is
    resumed finds in the cache what it computed before.

    >>> begin = Entry(id="a", tenant="acme", began_at=0, prompt_tokens=100, output_tokens=5)
    >>> resumed = Entry(id="a", tenant="acme", began_at=0, prompt_tokens=100, cached_tokens=96, output_tokens=9)
    >>> both = merged(begin, resumed)
    >>> both.output_tokens, both.cached_tokens, both == merged(resumed, begin)
    (9, 0, True)
    """
    assert (record.id, record.tenant_id) == (other.id, other.tenant_id)
    # A stream can be resumed with another key of its tenant: either key would do, but all must choose the same.
    first = min(record, other, key=lambda entry: (entry.full_group.encode(), entry.began_at))
    later = max(record, other, key=lambda entry: (entry.stage, entry.error.encode()))
    numbers = {name: max(getattr(record, name), getattr(other, name)) for name in NUMBERS}
    num_computed = max(entry.prompt_tokens - entry.cached_tokens for entry in (record, other))
    numbers["cached_tokens"] = numbers["prompt_tokens"] - num_computed
    if record.stage != other.stage:
        numbers |= {"requests": later.requests, "cut_off": later.cut_off}
    return msgspec.structs.replace(first, stage=later.stage, error=later.error, **numbers)
