"""The Lua scripts that change tenants and keys, and the one that reads the audit log.

A script gets its Redis keys as KEYS and what each comment names as ARGV. An empty record stands for none.
"""

from __future__ import annotations

from typing import Final

from ..canary_counts import NEWS, OF_A_LIFE, OF_A_TRIAL
from ..registry_scripts import (
    ADAPTERS,
    API_KEYS,
    AUDIT,
    CANARIES,
    EVENTS,
    KEY_ENDS,
    LAUNCH_KEYS,
    MADE_KEYS,
    NAMES,
    NOTE,
    NUMBER,
    OWNER,
    PINNED,
    PINS,
    SETTINGS,
    STORED,
    TELL,
    TENANTS,
    TENANTS_AUDIT,
    VERSION_NOTES,
)

CHANGED: Final = (TENANTS, API_KEYS, LAUNCH_KEYS, NUMBER, EVENTS, AUDIT)  # KEYS of CHANGE_SCRIPT and END_KEYS_SCRIPT
_REMOVE_MARKS = """
local function remove_marks(hashes)
  if not next(hashes) then return end
  for _, mark in ipairs(redis.call('SMEMBERS', KEYS[3])) do
    if hashes[string.match(mark, '%x+$')] then redis.call('SREM', KEYS[3], mark) end
  end
end
"""
# entry of the audit log, tenant, its record, its new record (empty: the same), most keys that are made for it, then
# hash, record and new record (empty: it is deleted) of each key. Changes all and returns 1; or nothing, and returns 0,
# as some record is another one, or 2, as there would be too many keys.
CHANGE_SCRIPT = f"""{TELL}{NOTE}{_REMOVE_MARKS}
if (redis.call('HGET', KEYS[1], ARGV[2]) or '') ~= ARGV[3] then return 0 end
local num_new = 0
for i = 6, #ARGV, 3 do
  if (redis.call('HGET', KEYS[2], ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
  if ARGV[i + 1] == '' then num_new = num_new + 1 end
end
local made = '{MADE_KEYS}' .. ARGV[2]
if num_new > 0 and redis.call('SCARD', made) + num_new > tonumber(ARGV[5]) then return 2 end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
  tell('tenant', ARGV[2], ARGV[4])
end
local gone = {{}}
for i = 6, #ARGV, 3 do
  local ends_at
  if ARGV[i + 2] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
    redis.call('SREM', made, ARGV[i])
    gone[ARGV[i]] = true
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
    if ARGV[i + 1] == '' then redis.call('SADD', made, ARGV[i]) end
    ends_at = cjson.decode(ARGV[i + 2]).expires_at
  end
  if ends_at then redis.call('ZADD', '{KEY_ENDS}', ends_at, ARGV[i]) else redis.call('ZREM', '{KEY_ENDS}', ARGV[i]) end
  tell('key', ARGV[i], ARGV[i + 2])
end
remove_marks(gone)
note(ARGV[2], ARGV[1], '')
return 1
"""
# tenant, cursor, count. Deletes its keys among about that many of all, and returns the next cursor.
END_KEYS_SCRIPT = f"""{TELL}{OWNER}{_REMOVE_MARKS}
local page = redis.call('HSCAN', KEYS[2], ARGV[2], 'COUNT', ARGV[3])
local gone = {{}}
for i = 1, #page[2], 2 do
  local record = page[2][i + 1]
  if string.find(record, ARGV[1], 1, true) and owner_of(record) == ARGV[1] then
    redis.call('HDEL', KEYS[2], page[2][i])
    redis.call('ZREM', '{KEY_ENDS}', page[2][i])
    tell('key', page[2][i], '')
    gone[page[2][i]] = true
  end
end
remove_marks(gone)
redis.call('DEL', '{MADE_KEYS}' .. ARGV[1])
return page[1]
"""
FORGET_KEYS_KEYS: Final = (API_KEYS, LAUNCH_KEYS, KEY_ENDS, NUMBER, EVENTS)
# seconds that a key is kept after its end, count. Deletes at most that many keys, those that ended first, and returns
# how many it has looked at. A key that a configuration gives stays: given again, it would be a new one without an end.
FORGET_KEYS_SCRIPT = f"""{TELL}{OWNER}
local now = tonumber(redis.call('TIME')[1])
local before = now - tonumber(ARGV[1])
local ended = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', before, 'LIMIT', 0, ARGV[2])
if not next(ended) then return 0 end
local is_configured = {{}}
for _, mark in ipairs(redis.call('SMEMBERS', KEYS[2])) do is_configured[string.match(mark, '%x+$')] = true end
for _, hash in ipairs(ended) do
  local record = redis.call('HGET', KEYS[1], hash) or ''
  local ends_at = string.sub(record, 1, 1) == '{{' and cjson.decode(record).expires_at
  if not ends_at or ends_at > before then
    redis.call('ZREM', KEYS[3], hash)
  elseif is_configured[hash] then
    redis.call('ZADD', KEYS[3], now, hash)  -- looked at again after as long
  else
    redis.call('ZREM', KEYS[3], hash)
    redis.call('HDEL', KEYS[1], hash)
    redis.call('SREM', '{MADE_KEYS}' .. owner_of(record), hash)
    tell('key', hash, '')
  end
end
return #ended
"""
END_ADAPTERS_KEYS: Final = (ADAPTERS, NAMES, VERSION_NOTES, CANARIES, NUMBER, EVENTS)
# tenant, count, its life. Deletes at most that many of its adapters, with what was counted and said in their trials,
# and returns how many it has deleted. No text in a record or in notes has the quotes that are around an id.
END_ADAPTERS_SCRIPT = f"""{TELL}
local function end_trials(text)
  for id in string.gmatch(text, '"id":"(%x+)"') do
    redis.call('UNLINK', {", ".join(f"'{prefix}' .. id" for prefix in OF_A_TRIAL)})
    redis.call('HDEL', '{NEWS}', id)
  end
end
local first, last = '[' .. ARGV[1] .. '/', '(' .. ARGV[1] .. '0'
local names = redis.call('ZRANGEBYLEX', KEYS[2], first, last, 'LIMIT', 0, ARGV[2])
for _, name in ipairs(names) do
  local record = redis.call('HGET', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
  if record then
    end_trials(record)
    end_trials(redis.call('HGET', KEYS[3], name) or '')
    redis.call('HDEL', KEYS[1], name)
    redis.call('HDEL', KEYS[3], name)
    redis.call('ZREM', KEYS[4], name)
    redis.call('HDEL', '{PINS}', name)
    tell('delete', name, string.match(record, '^%d+') .. ' ' .. string.format('%d', next_number()))
  end
end
if #names < tonumber(ARGV[2]) then
  redis.call('HDEL', '{PINNED}', ARGV[1])
  redis.call('UNLINK', '{STORED}' .. ARGV[1], {", ".join(f"'{prefix}' .. ARGV[3]" for prefix in OF_A_LIFE)})
end
return #names
"""
SETTINGS_KEYS: Final = (SETTINGS, AUDIT)
# settings of before (empty: none), settings, entry of the audit log. Returns 1; 0: they are others by now.
SETTINGS_SCRIPT = f"""{NOTE}
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
note('', ARGV[3], '')
return 1
"""
# id before which to begin ('+': at the newest), count. Returns the id of the last of so many entries, the newest first
# (empty: there are no more), then id, entry and result of each.
READ_AUDIT_SCRIPT = f"""
local order = redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', ARGV[2])
local found = {{#order == tonumber(ARGV[2]) and order[#order][1] or ''}}
for _, one in ipairs(order) do
  local whose = one[2][2]
  local log = whose == '' and '{AUDIT}' or '{TENANTS_AUDIT}' .. whose
  local entry = redis.call('XRANGE', log, one[1], one[1])[1]
  if entry then
    found[#found + 1] = one[1]
    found[#found + 1] = entry[2][4]
    found[#found + 1] = entry[2][6]
  end
end
return found
"""
# The same of the operators' entries about one tenant, which is the third argument: so many entries are looked at.
READ_OPERATORS_SCRIPT = """
local entries = redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', ARGV[2])
local found = {#entries == tonumber(ARGV[2]) and entries[#entries][1] or ''}
for _, entry in ipairs(entries) do
  if entry[2][2] == ARGV[3] then
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2][4]
    found[#found + 1] = entry[2][6]
  end
end
return found
"""
