"""The Lua scripts that change tenants and keys, and the one that reads the audit log.

A script gets its Redis keys as KEYS and what each comment names as ARGV. An empty record stands for none.
"""

from __future__ import annotations

from typing import Final

from ..registry.registry_scripts import (
    ADAPTERS,
    API_KEYS,
    AUDIT,
    CANARIES,
    EVENTS,
    LAUNCH_KEYS,
    NAMES,
    NOTE,
    NUMBER,
    OWNER,
    SETTINGS,
    STORED,
    TELL,
    TENANTS,
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
# entry of the audit log, tenant, its record, its new record (empty: the same), then hash, record and new record (empty:
# it is deleted) of each key. Changes all and returns 1; 0: some record is another one, and nothing has changed.
CHANGE_SCRIPT = f"""{TELL}{NOTE}{_REMOVE_MARKS}
if (redis.call('HGET', KEYS[1], ARGV[2]) or '') ~= ARGV[3] then return 0 end
for i = 5, #ARGV, 3 do
  if (redis.call('HGET', KEYS[2], ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
  tell('tenant', ARGV[2], ARGV[4])
end
local gone = {{}}
for i = 5, #ARGV, 3 do
  if ARGV[i + 2] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
    gone[ARGV[i]] = true
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
  end
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
    tell('key', page[2][i], '')
    gone[page[2][i]] = true
  end
end
remove_marks(gone)
return page[1]
"""
END_ADAPTERS_KEYS: Final = (ADAPTERS, NAMES, VERSION_NOTES, CANARIES, NUMBER, EVENTS)
# tenant, count. Deletes at most that many of its adapters, and returns how many it has deleted.
END_ADAPTERS_SCRIPT = f"""{TELL}
local first, last = '[' .. ARGV[1] .. '/', '(' .. ARGV[1] .. '0'
local names = redis.call('ZRANGEBYLEX', KEYS[2], first, last, 'LIMIT', 0, ARGV[2])
for _, name in ipairs(names) do
  local record = redis.call('HGET', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
  if record then
    redis.call('HDEL', KEYS[1], name)
    redis.call('HDEL', KEYS[3], name)
    redis.call('ZREM', KEYS[4], name)
    tell('delete', name, string.match(record, '^%d+') .. ' ' .. string.format('%d', next_number()))
  end
end
if #names < tonumber(ARGV[2]) then redis.call('DEL', '{STORED}' .. ARGV[1]) end
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
# id before which to begin ('+': at the newest), count, tenant (empty: all). Looks at that many entries, the newest
# first, and returns the id of the last of them (empty: there are no more), then id, entry and result of those found.
READ_AUDIT_SCRIPT = """
local entries = redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', ARGV[2])
local found = {#entries == tonumber(ARGV[2]) and entries[#entries][1] or ''}
for _, entry in ipairs(entries) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  if ARGV[3] == '' or fields.tenant == ARGV[3] then
    found[#found + 1] = entry[1]
    found[#found + 1] = fields.entry
    found[#found + 1] = fields.result
  end
end
return found
"""
