"""What a registry stores in Redis, and the Lua scripts that read or change several of its keys at once.

A record of a name is "version digest facts", where the facts are JSON that holds its revision and its other versions.
Each change gives it a higher revision, which is the number of the change's event. A launch mark is "owner hash": the
owner is a launch that gave the API key with this hash. Tenants and API keys are JSON of their records; a key's may be
the bare name of its tenant. A script gets its Redis keys as KEYS and what each comment names as ARGV.
"""

from __future__ import annotations

from .versions.rollout import MAX_CANARIES, MAX_PINS, MAX_PINS_IN_ALL

PREFIX = "motet:{registry}:"  # the braces put all keys into one slot of a Redis cluster
ADAPTERS = PREFIX + "adapters"  # hash: tenant/name -> record
NAMES = PREFIX + "names"  # sorted set of tenant/name, all with the score 0, so that they are sorted by name
VERSIONS = PREFIX + "versions"  # hash: tenant/name -> last version, kept when the name is deleted
VERSION_NOTES = PREFIX + "version_notes"  # hash: tenant/name -> JSON of NameNotes, for names that have any
STORED = PREFIX + "stored:"  # + tenant, hash: id of a key (empty: all of the tenant) -> "adapters bytes"
STORED_IS_COUNTED = PREFIX + "stored_is_counted"  # set once all tenants' are, in a registry older than the counts
PINS = PREFIX + "pins"  # hash: tenant/name that is pinned -> "digest gangs"
PINNED = PREFIX + "pinned"  # hash: tenant -> "pins bytes"; the bytes of each count for each of its gangs
CANARIES = PREFIX + "canary_names"  # sorted set of tenant/name that have a canary, all with the score 0
API_KEYS = PREFIX + "keys"  # hash: SHA-256 of an API key -> its record, or its tenant
MADE_KEYS = PREFIX + "made_keys:"  # + tenant, set: hashes of its keys, but for configured ones
KEY_ENDS = PREFIX + "key_ends"  # sorted set: hashes of keys by when they end, Unix seconds
TENANTS = PREFIX + "tenants"  # hash: name -> record of the tenant
AUDIT = PREFIX + "audit"  # stream of (tenant, entry, result): what operators have changed
TENANTS_AUDIT = PREFIX + "audit:"  # + tenant, the same: what its keys and tokens have, and its canaries' judge
AUDIT_ORDER = PREFIX + "audit_order"  # stream of (whose): the ids of all entries, and whose log has each; empty: AUDIT
LAUNCH_KEYS = PREFIX + "launch_keys"  # set of launch marks
LAUNCHES = PREFIX + "launches"  # hash: launch that has given keys -> number of its beats
CLUSTER_TOKEN = PREFIX + "cluster_token"  # that routers show to gangs, where no file says one
SETTINGS = PREFIX + "settings"  # JSON of those that routers have now
BASE = PREFIX + "base"  # fingerprint and name of the base that all adapters belong to
NUMBER = PREFIX + "event_number"  # number of events so far
STREAM_KEY = PREFIX + "stream_key"  # hex: with which routers seal the ids of events
SWEEP = PREFIX + "sweep:"  # + id of a store: the sweep that holds this store, as a string that expires
EVENTS = PREFIX + "events"  # stream of (number, kind, field, value), see events.py
_NUM_EVENTS_KEPT = 10_000
NUM_AUDIT_ENTRIES_KEPT = 100_000  # of operators
NUM_TENANTS_AUDIT_ENTRIES_KEPT = 1000  # of each tenant: nobody pushes out what others have done

TELL = f"""
local function next_number()  -- of the event that is told next
  return tonumber(redis.call('GET', '{NUMBER}') or '0') + 1
end
local function tell(kind, field, value)
  local number = redis.call('INCR', '{NUMBER}')
  redis.call('XADD', '{EVENTS}', 'MAXLEN', '~', {_NUM_EVENTS_KEPT}, '*',
             'number', number, 'kind', kind, 'field', field, 'value', value)
end
"""
NOTE = f"""
local function note(tenant, entry, result)
  if entry == '' then return end
  local kind = cjson.decode(entry).actor.kind
  local whose, log, most = '', '{AUDIT}', {NUM_AUDIT_ENTRIES_KEPT}
  if kind ~= 'operator' and kind ~= 'configuration' then
    whose, log, most = tenant, '{TENANTS_AUDIT}' .. tenant, {NUM_TENANTS_AUDIT_ENTRIES_KEPT}
  end
  local id = redis.call('XADD', '{AUDIT_ORDER}', '*', 'whose', whose)
  redis.call('XADD', log, id, 'tenant', tenant, 'entry', entry, 'result', result)
  if redis.call('XLEN', log) > most then
    local oldest = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1][1]
    redis.call('XDEL', log, oldest)
    redis.call('XDEL', '{AUDIT_ORDER}', oldest)
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
# What a name stores counts for its tenant, and each of its versions for the key that has uploaded it. `bounds`: id of
# a key (empty: the tenant), most adapters, most bytes (empty: no bound), in turn. `count_stored` returns the id of the
# key whose bound a change would exceed, with what it has and what would come on top, and changes nothing; or nil.
_COUNT_STORED = f"""
local function add(counts, owner, adapters, bytes)
  local count = counts[owner] or {{0, 0}}
  counts[owner] = {{count[1] + adapters, count[2] + bytes}}
end
local function add_name(counts, record, notes, sign)
  if record == '' then return end
  local version, text = string.match(record, '^(%d+) %x+ (.*)$')
  local facts = cjson.decode(text)
  local versions = {{{{version, facts.num_bytes}}}}
  for _, other in ipairs(facts.rollout and facts.rollout.others or {{}}) do
    versions[#versions + 1] = {{string.format('%d', other[1]), other[3]}}
  end
  local by = notes ~= '' and cjson.decode(notes).versions or {{}}
  local keys = {{}}
  add(counts, '', sign, 0)
  for _, one in ipairs(versions) do
    local key = by[one[1]] and by[one[1]].uploaded_by or ''
    add(counts, '', 0, sign * one[2])
    if key ~= '' then
      add(counts, key, keys[key] and 0 or sign, sign * one[2])
      keys[key] = true
    end
  end
end
local function stored_of(tenant, owner)
  local adapters, bytes = string.match(redis.call('HGET', '{STORED}' .. tenant, owner) or '0 0', '(%S+) (%S+)')
  return tonumber(adapters), tonumber(bytes)
end
local function write_stored(tenant, owner, adapters, bytes)
  if adapters == 0 and bytes == 0 then
    redis.call('HDEL', '{STORED}' .. tenant, owner)
  else
    redis.call('HSET', '{STORED}' .. tenant, owner, string.format('%d %.0f', adapters, bytes))
  end
end
local function count_stored(field, before, notes_before, after, notes_after, bounds)
  local tenant, more = string.match(field, '^[^/]*'), {{}}
  add_name(more, before, notes_before, -1)
  add_name(more, after, notes_after, 1)
  for i = 1, #bounds, 3 do
    local owner, change = bounds[i], more[bounds[i]] or {{0, 0}}
    local adapters, bytes = stored_of(tenant, owner)
    if (bounds[i + 1] ~= '' and change[1] > 0 and adapters + change[1] > tonumber(bounds[i + 1]))
        or (bounds[i + 2] ~= '' and change[2] > 0 and bytes + change[2] > tonumber(bounds[i + 2])) then
      return {{owner, adapters, string.format('%.0f', bytes), change[1], string.format('%.0f', change[2])}}
    end
  end
  for owner, change in pairs(more) do
    local adapters, bytes = stored_of(tenant, owner)
    write_stored(tenant, owner, adapters + change[1], bytes + change[2])
  end
end
"""
# What a name pins counts for its tenant: bytes of its current version, for each gang. `pin_change` returns why it may
# not be, as {'pinned_bytes', bytes, most} or {'pins', most}, or nil; and how to note it.
_COUNT_PINS = f"""
local function pin_of(record)
  if not string.find(record, '"pinned_gangs"', 1, true) then return nil, 0, 0 end
  local digest, text = string.match(record, '^%d+ (%x+) (.*)$')
  local facts = cjson.decode(text)
  local gangs = facts.rollout.pinned_gangs
  if not gangs then return nil, 0, 0 end
  return digest, gangs, gangs * facts.num_bytes
end
local function pin_change(field, before, after, bounds)
  local digest_before, _, bytes_before = pin_of(before)
  local digest, gangs, bytes = pin_of(after)
  if not (digest_before or digest) then return nil, function() end end
  local tenant = string.match(field, '^[^/]*')
  local num, sum = string.match(redis.call('HGET', '{PINNED}', tenant) or '0 0', '(%S+) (%S+)')
  num = tonumber(num) + (digest and 1 or 0) - (digest_before and 1 or 0)
  sum = tonumber(sum) + bytes - bytes_before
  if bytes > bytes_before then
    for _, most in ipairs(bounds) do
      if sum > most then return {{'pinned_bytes', string.format('%.0f', sum), string.format('%.0f', most)}} end
    end
  end
  if digest and not digest_before then
    if num > {MAX_PINS} then return {{'pins', {MAX_PINS}}} end
    if redis.call('HLEN', '{PINS}') >= {MAX_PINS_IN_ALL} then return {{'pins_in_all', {MAX_PINS_IN_ALL}}} end
  end
  return nil, function()
    if digest then
      redis.call('HSET', '{PINS}', field, digest .. ' ' .. string.format('%d', gangs))
    else
      redis.call('HDEL', '{PINS}', field)
    end
    if num == 0 then
      redis.call('HDEL', '{PINNED}', tenant)
    else
      redis.call('HSET', '{PINNED}', tenant, string.format('%d %.0f', num, sum))
    end
  end
end
"""
# tenant/name. Returns {record, last version, notes}; empty: none.
READ_NAME_SCRIPT = """
return {redis.call('HGET', KEYS[1], ARGV[1]) or '', redis.call('HGET', KEYS[2], ARGV[1]) or '0',
        redis.call('HGET', KEYS[3], ARGV[1]) or ''}
"""
# tenant/name; record, last version and notes as they were read; "version digest ", facts without brace and revision,
# last version, notes, 1 if it has a canary; entry of the audit log (empty: none) and its result; num_ended of the
# tenant that asks (empty: any); most bytes that its tenant may have pinned (empty: any, beside its quota); then
# bounds of what is stored. Returns the record; nil and no change: the name is not
# as it was read; 0 and no change: that tenant is being deleted or was; 1 and no change: its tenant has as many canaries
# as it may; a list and no change: see `count_stored` and `pin_change`.
CHANGE_NAME_SCRIPT = f"""{TELL}{NOTE}{_COUNT_STORED}{_COUNT_PINS}
local field = ARGV[1]
local tenant = string.match(field, '^[^/]*')
local owner = redis.call('HGET', '{TENANTS}', tenant)
if owner then owner = cjson.decode(owner) end
if owner and ARGV[12] ~= '' then
  if owner.is_ending or (owner.num_ended or 0) ~= tonumber(ARGV[12]) then return 0 end
end
if (redis.call('HGET', KEYS[1], field) or '') ~= ARGV[2] or (redis.call('HGET', KEYS[3], field) or '0') ~= ARGV[3]
    or (redis.call('HGET', KEYS[4], field) or '') ~= ARGV[4] then return false end
if ARGV[9] == '1' and not redis.call('ZSCORE', KEYS[5], field)
    and redis.call('ZLEXCOUNT', KEYS[5], '[' .. tenant .. '/', '(' .. tenant .. '0') >= {MAX_CANARIES} then return 1 end
local record = ARGV[5] .. '{{"revision":' .. string.format('%d', next_number()) .. ',' .. ARGV[6]
local pin_bounds = {{tonumber(ARGV[13])}}
if owner and owner.quota and type(owner.quota.pinned_bytes) == 'number' then
  pin_bounds[#pin_bounds + 1] = owner.quota.pinned_bytes
end
local over, note_pin = pin_change(field, ARGV[2], record, pin_bounds)
over = over or count_stored(field, ARGV[2], ARGV[4], record, ARGV[8], {{unpack(ARGV, 14)}})
if over then return over end
note_pin()
redis.call('HSET', KEYS[1], field, record)
redis.call('ZADD', KEYS[2], 0, field)
redis.call('HSET', KEYS[3], field, ARGV[7])
if ARGV[8] == '' then redis.call('HDEL', KEYS[4], field) else redis.call('HSET', KEYS[4], field, ARGV[8]) end
if ARGV[9] == '1' then redis.call('ZADD', KEYS[5], 0, field) else redis.call('ZREM', KEYS[5], field) end
tell('set', field, record)
note(tenant, ARGV[10], ARGV[11])
return record
"""
# tenant/name, entry of the audit log (empty: none). Returns "version revision" of the record that is deleted and of its
# end; nil: there is no such name.
DELETE_SCRIPT = f"""{TELL}{NOTE}{_COUNT_STORED}{_COUNT_PINS}
local current = redis.call('HGET', KEYS[1], ARGV[1])
if not current then return false end
count_stored(ARGV[1], current, redis.call('HGET', KEYS[3], ARGV[1]) or '', '', '', {{}})
local _, note_pin = pin_change(ARGV[1], current, '', {{}})
note_pin()
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
local version = string.match(current, '^%d+')
local ended = version .. ' ' .. string.format('%d', next_number())
tell('delete', ARGV[1], ended)
note(string.match(ARGV[1], '^[^/]*'), ARGV[2], version)
return ended
"""
# tenant (empty: before the first). Counts anew what the next tenant has stored, and returns it; empty: there is none.
RECOUNT_SCRIPT = f"""{_COUNT_STORED}
local first = '-'
if ARGV[1] ~= '' then first = '[' .. ARGV[1] .. '0' end
local next_name = redis.call('ZRANGEBYLEX', KEYS[1], first, '+', 'LIMIT', 0, 1)[1]
if not next_name then return '' end
local tenant, counts = string.match(next_name, '^[^/]*'), {{}}
for _, field in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[' .. tenant .. '/', '(' .. tenant .. '0')) do
  add_name(counts, redis.call('HGET', KEYS[2], field) or '', redis.call('HGET', KEYS[3], field) or '', 1)
end
redis.call('DEL', '{STORED}' .. tenant)
for owner, count in pairs(counts) do write_stored(tenant, owner, count[1], count[2]) end
return tenant
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
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('SREM', '{MADE_KEYS}' .. before, ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
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
# cursor, count. Returns the next cursor and the first 16 digits of the digests of all versions of about that many
# adapters, joined. The digest is the second field of each of a record's other versions.
DIGESTS_SCRIPT = """
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local found = {}
for i = 2, #page[2], 2 do
  local digest, facts = string.match(page[2][i], '^%d+ (%x+) (.*)$')
  found[#found + 1] = string.sub(digest, 1, 16)
  if string.find(facts, '"others"', 1, true) then
    for _, other in ipairs(cjson.decode(facts)['rollout']['others']) do
      found[#found + 1] = string.sub(other[2], 1, 16)
    end
  end
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
