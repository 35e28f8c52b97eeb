"""What the ledger stores in Redis, and the Lua script that takes entries in.

A tenant's keys are in one slot of a Redis cluster: a script is given their beginning as KEYS[1]. They go by the
tenant's life: who gets the name of a deleted tenant has keys of its own.
"""

from __future__ import annotations

from typing import Final

from .entry import OTHERS

LIVES: Final = "motet:{ledger}:tenants"  # set: lives of tenants that may have a ledger
ARCHIVIST: Final = "motet:{ledger}:archivist"  # the router that archives, as a string that expires
ENTRIES: Final = "entries"  # stream: each entry that changed something, as JSON in the field e
SEEN: Final = "seen:"  # + day: hash, id -> "stage\ngroup\nnumbers", what was counted of it
HOURS: Final = "hours:"  # + day: hash, "hour\tgroup" -> numbers
DAYS: Final = "days:"  # + month: hash, "day\tgroup" -> numbers, and "day\t" -> how many groups the day has


def prefix_of(life: str) -> str:
    return f"motet:{{tenant:{life}}}:ledger:"


# A cursor, and about how many fields of the hash to return: as HSCAN, but fields and values as one text with line feeds
# between them, which a client takes apart in a tenth of the time that it takes to read a list.
SUMS_SCRIPT: Final = """
local found = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
return {found[1], table.concat(found[2], '\\n')}
"""

# Seconds that an id, an hour and a day are kept, and how many groups a day has at most; then for each entry: id, month,
# day, hour, stage, group, numbers and JSON.
# The entry is merged with what was counted of its id, as `merged` in entry.py says, and the sums change by the
# difference. What is counted as one of the others stays so. Returns how many entries changed something.
TAKE_SCRIPT: Final = f"""
local function numbers_of(text)
  local found = {{}}
  for number in string.gmatch(text, '%S+') do found[#found + 1] = tonumber(number) end
  return found
end
local function add(key, place, group, sign, numbers, counts_groups)
  local field = place .. '\\t' .. group
  local held = redis.call('HGET', key, field)
  local sums, is_empty, shown = held and numbers_of(held) or {{}}, true, {{}}
  for i = 1, math.max(#sums, #numbers) do
    local sum = (sums[i] or 0) + sign * (numbers[i] or 0)
    if sum ~= 0 then is_empty = false end
    shown[i] = string.format('%.0f', sum)
  end
  local more
  if is_empty then more = -redis.call('HDEL', key, field)
  else more = redis.call('HSET', key, field, table.concat(shown, ' ')) end
  if counts_groups and more ~= 0 then redis.call('HINCRBY', key, place .. '\\t', more) end
end
local function has_room(key, place, group)
  if redis.call('HEXISTS', key, place .. '\\t' .. group) == 1 then return true end
  return tonumber(redis.call('HGET', key, place .. '\\t') or 0) < tonumber(ARGV[4])
end
local function is_before(one, other)  -- by bytes: Lua's own order is the locale's
  for i = 1, math.min(#one, #other) do
    local a, b = string.byte(one, i), string.byte(other, i)
    if a ~= b then return a < b end
  end
  return #one < #other
end
local prefix, num_changed, touched = KEYS[1], 0, {{}}
for i = 5, #ARGV, 8 do
  local id, month, day, hour = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local stage, group, numbers = tonumber(ARGV[i + 4]), ARGV[i + 5], numbers_of(ARGV[i + 6])
  local seen = prefix .. '{SEEN}' .. day
  local before, old_group, old = redis.call('HGET', seen, id), nil, {{}}
  if before then
    local old_stage, told
    old_stage, old_group, told = string.match(before, '^(%d)\\n([^\\n]*)\\n(.*)$')
    old_stage, old = tonumber(old_stage), numbers_of(told)
    if old_stage > stage then
      stage, numbers = old_stage, old
    elseif old_stage == stage then
      local largest = {{}}
      for j = 1, math.max(#old, #numbers) do largest[j] = math.max(old[j] or 0, numbers[j] or 0) end
      numbers = largest
    end
    if old_group == '{OTHERS}' or is_before(old_group, group) then group = old_group end
  end
  local hours, days = {{'{HOURS}' .. day, hour, ARGV[2]}}, {{'{DAYS}' .. month, string.sub(day, 7), ARGV[3], true}}
  if group ~= old_group and not has_room(prefix .. days[1], days[2], group) then group = '{OTHERS}' end
  local shown = {{}}
  for j, number in ipairs(numbers) do shown[j] = string.format('%.0f', number) end
  local now = string.format('%d\\n%s\\n%s', stage, group, table.concat(shown, ' '))
  if now ~= before then
    num_changed = num_changed + 1
    redis.call('HSET', seen, id, now)
    touched[seen] = ARGV[1]
    for _, place in ipairs({{hours, days}}) do
      local key = prefix .. place[1]
      touched[key] = place[3]
      if before then add(key, place[2], old_group, -1, old, place[4]) end
      add(key, place[2], group, 1, numbers, place[4])
    end
    redis.call('XADD', prefix .. '{ENTRIES}', '*', 'e', ARGV[i + 7])
  end
end
for key, seconds in pairs(touched) do redis.call('EXPIRE', key, seconds) end
return num_changed
"""
