"""What a registry stores in Redis, and the Lua scripts that read or change several of its keys at once.

A record of an adapter is "version digest facts", where the facts are JSON. A launch mark is "owner hash": the owner is
a launch that gave the API key with this hash. Tenants and API keys are JSON of their records; a key's may be the bare
name of its tenant. A script gets its Redis keys as KEYS and what each comment names as ARGV.
"""

from __future__ import annotations

PREFIX = "motet:{registry}:"  # the braces put all keys into one slot of a Redis cluster
ADAPTERS = PREFIX + "adapters"  # hash: tenant/name -> record
NAMES = PREFIX + "names"  # sorted set of tenant/name, all with the score 0, so that they are sorted by name
VERSIONS = PREFIX + "versions"  # hash: tenant/name -> last version, kept when the name is deleted
API_KEYS = PREFIX + "keys"  # hash: SHA-256 of an API key -> its record, or its tenant
TENANTS = PREFIX + "tenants"  # hash: name -> record of the tenant
AUDIT = PREFIX + "audit"  # stream of (tenant, entry, result): who changed what
LAUNCH_KEYS = PREFIX + "launch_keys"  # set of launch marks
LAUNCHES = PREFIX + "launches"  # hash: launch that has given keys -> number of its beats
CLUSTER_TOKEN = PREFIX + "cluster_token"  # that routers show to gangs, where no file says one
BASE = PREFIX + "base"  # fingerprint and name of the base that all adapters belong to
NUMBER = PREFIX + "event_number"  # number of events so far
STREAM_KEY = PREFIX + "stream_key"  # hex: with which routers seal the ids of events
SWEEP = PREFIX + "sweep:"  # + id of a store: the sweep that holds this store, as a string that expires
EVENTS = PREFIX + "events"  # stream of (number, kind, field, value), see events.py
_NUM_EVENTS_KEPT = 10_000
NUM_AUDIT_ENTRIES_KEPT = 100_000

TELL = f"""
local function tell(kind, field, value)
  local number = redis.call('INCR', '{NUMBER}')
  redis.call('XADD', '{EVENTS}', 'MAXLEN', '~', {_NUM_EVENTS_KEPT}, '*',
             'number', number, 'kind', kind, 'field', field, 'value', value)
end
"""
NOTE = f"""
local function note(tenant, entry, result)
  if entry ~= '' then
    redis.call('XADD', '{AUDIT}', 'MAXLEN', '~', {NUM_AUDIT_ENTRIES_KEPT}, '*',
               'tenant', tenant, 'entry', entry, 'result', result)
  end
end
"""
# Whose a key is, by what API_KEYS says of it.
OWNER = """
local function owner_of(record)
  if string.sub(record, 1, 1) == '{' then return cjson.decode(record).tenant end
  return record
end
"""
# tenant/name, digest, facts, entry of the audit log (empty: none), num_ended of the tenant that asks (empty: any).
# Returns 0 if that tenant is being deleted or was, else {1 if this made a new version else 0, record}.
REGISTER_SCRIPT = f"""{TELL}{NOTE}
local tenant = string.match(ARGV[1], '^[^/]*')
local owner = redis.call('HGET', '{TENANTS}', tenant)
if owner and ARGV[5] ~= '' then
  owner = cjson.decode(owner)
  if owner.is_ending or (owner.num_ended or 0) ~= tonumber(ARGV[5]) then return 0 end
end
local current = redis.call('HGET', KEYS[1], ARGV[1])
if current and string.match(current, '^%d+ (%x+) ') == ARGV[2] then return {{0, current}} end
local version = redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
local record = string.format('%d', version) .. ' ' .. ARGV[2] .. ' ' .. ARGV[3]
redis.call('HSET', KEYS[1], ARGV[1], record)
redis.call('ZADD', KEYS[2], 0, ARGV[1])
tell('set', ARGV[1], record)
note(tenant, ARGV[4], string.format('%d', version))
return {{1, record}}
"""
# tenant/name, entry of the audit log (empty: none). Returns the version that is deleted; nil: there is no such name.
DELETE_SCRIPT = f"""{TELL}{NOTE}
local current = redis.call('HGET', KEYS[1], ARGV[1])
if not current then return false end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
local version = string.match(current, '^%d+')
tell('delete', ARGV[1], version)
note(string.match(ARGV[1], '^[^/]*'), ARGV[2], version)
return version
"""
# hash of an API key, tenant (empty: deletes the key). Removes the key's launch marks and returns nil; or changes
# nothing and returns the tenant that the key belongs to, if that is another one.
SET_KEY_SCRIPT = f"""{TELL}{OWNER}
local before = owner_of(redis.call('HGET', KEYS[1], ARGV[1]) or '')
if before ~= '' and ARGV[2] ~= '' and before ~= ARGV[2] then return before end
for _, mark in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if string.match(mark, '%x+$') == ARGV[1] then redis.call('SREM', KEYS[2], mark) end
end
if before == ARGV[2] then return false end
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
tell('key', ARGV[1], ARGV[2])
return false
"""
_NUM_OWNERS = """
local num_owners = {}
for _, mark in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local hash = string.match(mark, '%x+$')
  num_owners[hash] = (num_owners[hash] or 0) + 1
end
"""
# owner, then hash and tenant of each key that this owner gives. Returns nil; or changes nothing and returns
# {tenant, other tenant} for the first key that belongs to another tenant.
GIVE_KEYS_SCRIPT = f"""{TELL}{OWNER}
for i = 2, #ARGV, 2 do
  local before = redis.call('HGET', KEYS[1], ARGV[i])
  if before and owner_of(before) ~= ARGV[i + 1] then return {{ARGV[i + 1], owner_of(before)}} end
end
{_NUM_OWNERS}
for i = 2, #ARGV, 2 do
  local is_new = redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) == 1
  if is_new then tell('key', ARGV[i], ARGV[i + 1]) end
  if is_new or num_owners[ARGV[i]] then redis.call('SADD', KEYS[2], ARGV[1] .. ' ' .. ARGV[i]) end
end
return false
"""
# owner, then hashes of keys that this owner gives no more. Deletes those that no other owner gives.
TAKE_BACK_KEYS_SCRIPT = f"""{TELL}{_NUM_OWNERS}
for i = 2, #ARGV do
  if redis.call('SREM', KEYS[2], ARGV[1] .. ' ' .. ARGV[i]) == 1 and num_owners[ARGV[i]] == 1 then
    redis.call('HDEL', KEYS[1], ARGV[i])
    tell('key', ARGV[i], '')
  end
end
return false
"""
# base, 1: a registry without adapters may change its base. Returns the base that the registry has now.
CLAIM_BASE_SCRIPT = """
if redis.call('SETNX', KEYS[1], ARGV[1]) == 0 and ARGV[2] == '1' and redis.call('HLEN', KEYS[2]) == 0 then
  redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('GET', KEYS[1])
"""
# tenant, name (empty: from the first), count. Returns tenant/name and record, in turn, of at most that many of the
# tenant's adapters, those that follow the name; '0' is the character after '/'.
LIST_SCRIPT = """
local first = '[' .. ARGV[1] .. '/'
if ARGV[2] ~= '' then first = '(' .. ARGV[1] .. '/' .. ARGV[2] end
local names = redis.call('ZRANGEBYLEX', KEYS[2], first, '(' .. ARGV[1] .. '0', 'LIMIT', 0, ARGV[3])
local found = {}
for _, name in ipairs(names) do
  found[#found + 1] = name
  found[#found + 1] = redis.call('HGET', KEYS[1], name)
end
return found
"""
# cursor, count. Returns the next cursor and about that many fields of a hash and their values, in turn, a line each: a
# client reads one long string much faster than many short ones.
SCAN_SCRIPT = """
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
return {page[1], table.concat(page[2], '\\n')}
"""
# cursor, count. Returns the next cursor and the first 16 digits of the digests of about that many adapters, joined.
DIGESTS_SCRIPT = """
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local found = {}
for i = 2, #page[2], 2 do
  found[#found + 1] = string.sub(string.match(page[2][i], '^%d+ (%x+) '), 1, 16)
end
return {page[1], table.concat(found)}
"""
# tenant (empty: from the first), name, count. Looks at that many tenants that follow, and returns the last of them
# (empty: there are no more), then those of them that have an adapter of this name. It goes from tenant to tenant, past
# their other adapters.
TENANTS_SCRIPT = """
local tenant, found = ARGV[1], {''}
for _ = 1, tonumber(ARGV[3]) do
  local first = '-'
  if tenant ~= '' then first = '[' .. tenant .. '0' end
  local next_name = redis.call('ZRANGEBYLEX', KEYS[1], first, '+', 'LIMIT', 0, 1)[1]
  if not next_name then return found end
  tenant = string.match(next_name, '^[^/]*')
  if redis.call('ZSCORE', KEYS[1], tenant .. '/' .. ARGV[2]) then found[#found + 1] = tenant end
end
found[1] = tenant
return found
"""
# sweep, milliseconds. Gives the store to this sweep for so long, and returns 1; 0: another sweep holds it.
HOLD_SWEEP_SCRIPT = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if tonumber(ARGV[2]) > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
else
  redis.call('DEL', KEYS[1])
end
return 1
"""
