"""What a registry stores in Redis, in layout 1. Its records are read and changed through store.py.

A record of a name is "version digest facts", where the facts are JSON that holds its revision and its other versions.
Each change gives it a higher revision, which is the number of the change's event. A launch mark is "owner hash": the
owner is a launch that gave the API key with this hash. Tenants and API keys are JSON of their records; a key's may be
the bare name of its tenant.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from redis.asyncio import Redis

from .lua_script import BoundScript, LuaScript

PREFIX = "motet:{registry}:"  # the braces put all keys into one slot of a Redis cluster
ADAPTERS = PREFIX + "adapters"  # hash: tenant/name -> record
NAMES = PREFIX + "names"  # sorted set of tenant/name, all with the score 0, so that they are sorted by name
VERSIONS = PREFIX + "versions"  # hash: tenant/name -> last version, kept when the name is deleted
VERSION_NOTES = PREFIX + "version_notes"  # hash: tenant/name -> JSON of NameNotes, for names that have any
STORED = PREFIX + "stored:"  # + tenant, hash: id of a key, ~user, or empty: all of the tenant -> "adapters bytes"
UNSWEPT = PREFIX + "unswept:"  # + tenant, hash: digest that its names have lost -> "event bytes key_id user"
UNSWEPT_TENANTS = PREFIX + "unswept_tenants"  # set of tenants that have any
STORED_IS_COUNTED = PREFIX + "stored_is_counted"  # set once all tenants' are, in a registry older than the counts
PINS = PREFIX + "pins"  # hash: tenant/name that is pinned -> "digest gangs"
PINNED = PREFIX + "pinned"  # hash: tenant -> "pins bytes"; the bytes of each count for each of its gangs
CANARIES = PREFIX + "canary_names"  # sorted set of tenant/name that have a canary, all with the score 0
API_KEYS = PREFIX + "keys"  # hash: SHA-256 of an API key -> its record, or its tenant
MADE_KEYS = PREFIX + "made_keys:"  # + tenant, set: hashes of its keys, but for configured ones
KEY_ENDS = PREFIX + "key_ends"  # sorted set: hashes of keys by when they end, Unix seconds
TENANTS = PREFIX + "tenants"  # hash: name -> record of the tenant
ENDED_USERS = PREFIX + "ended_users:"  # + tenant, sorted set that expires: users by the events of their deletion
AUDIT = PREFIX + "audit"  # stream of (tenant, entry, result): what operators have changed
TENANTS_AUDIT = PREFIX + "audit:"  # + tenant, the same: changes by its keys, its tokens and its canaries' judge
AUDIT_ORDER = PREFIX + "audit_order"  # stream of (whose): ids of all entries, and whose log has each
LAUNCH_KEYS = PREFIX + "launch_keys"  # set of launch marks
LAUNCHES = PREFIX + "launches"  # hash: launch that has given keys -> number of its heartbeats
STARTS = PREFIX + "starts:"  # + launch, hash: id of a replica that cannot start yet -> JSON of its StartReport
ROLLOUTS = PREFIX + "rollouts"  # hash: launch -> JSON of its application's Rollout
ROLLOUT_LOOK = PREFIX + "rollout_look:"  # + launch: a router looks after its rollout, as a string that expires
CLUSTER_TOKEN = PREFIX + "cluster_token"  # that routers show to gangs, unless a file holds one
SETTINGS = PREFIX + "settings"  # JSON of those that routers serve by now
LAYOUT = PREFIX + "layout"  # "number version": of this layout, and the first version of motet that has written it
BASE = PREFIX + "base"  # fingerprint and name of the base that all adapters belong to
EVENT_NUMBER = PREFIX + "event_number"  # number of events so far
STREAM_KEY = PREFIX + "stream_key"  # hex: with which routers seal the ids of events
SWEEP = PREFIX + "sweep:"  # + id of a store: the sweep that holds this store, as a string that expires
POSITIONS = PREFIX + "positions"  # sorted set that expires: routers by the number of the last event that they applied
EVENTS = PREFIX + "events"  # stream of (number, kind, field, value), see events.py
CANARY_COUNTS = PREFIX + "canary:"  # + trial: hash of counts, by "arm what", and "of": tenant/name
CANARY_STICKY = PREFIX + "canary_sticky:"  # + trial: hash: what counted, by "arm kind" and by "arm kind sticky key"
CANARY_COMMENTS = PREFIX + "canary_comments:"  # + trial: list, the newest first
UPDATED_TRIALS = PREFIX + "canary_news"  # hash: trial -> how often something was counted since the judge looked
ANSWERS = PREFIX + "answers:"  # + tenant_id: hash: response id -> "trial arm sticky", with " rated" once it was
ANSWER_ORDER = PREFIX + "answer_order:"  # + tenant_id: sorted set of response ids, by when they were counted
FILES = PREFIX + "files:"  # + tenant_id: hash: id of a file -> its FileRecord as JSON
FILE_USES = PREFIX + "file_uses:"  # + tenant_id: hash: id of a file -> how many batches that have not ended read it
FILE_BYTES = PREFIX + "file_bytes:"  # + tenant, hash: owner as in STORED -> bytes of files, responses and results
RESPONSES = PREFIX + "responses:"  # + tenant_id: hash: id of a stored response -> its FileRecord as JSON
FILE_ENDS = PREFIX + "file_ends"  # sorted set of "tenant_id/id" of files, responses, batches by when they expire
FILE_SWEEP = PREFIX + "file_sweep"  # the router that removes expired files, as a string that expires
BATCHES = PREFIX + "batches:"  # + tenant_id: hash: id of a batch -> its BatchRecord as JSON
BATCH_QUEUE = PREFIX + "batch_queue:"  # + tenant_id: set of ids of batches that have not ended
BATCH_TENANTS = PREFIX + "batch_tenants"  # sorted set of ids of tenants that have any, by when one was last begun
BATCH_LEASE = PREFIX + "batch:"  # + id: the router that runs the batch, as a string that expires

_FOLDER: Final = Path(__file__).parent


def bind_script(client: Redis, name: str, *, allow_oom: bool = False, no_writes: bool = False) -> BoundScript:
    """The script in the file `name` of this folder, whose calls pass its keys.

    `allow_oom`: it works while Redis is at its bound of memory. `no_writes`: see `LuaScript`.
    """
    return _load(name, allow_oom=allow_oom, no_writes=no_writes).bind(client)


@cache
def _load(name: str, *, allow_oom: bool, no_writes: bool) -> LuaScript:
    return LuaScript(_FOLDER / name, allow_oom=allow_oom, no_writes=no_writes)
