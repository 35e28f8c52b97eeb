"""What the ledger stores in Redis, and the Lua script that takes entries in.

A tenant's keys are in one slot of a Redis cluster: a script is given their beginning as KEYS[1].
"""

from __future__ import annotations

from typing import Final

TENANTS: Final = "motet:{ledger}:tenants"  # set: those that may have a ledger
ARCHIVIST: Final = "motet:{ledger}:archivist"  # the router that archives, as a string that expires
ENTRIES: Final = "entries"  # stream: each entry that changed something, as JSON in the field e
SEEN: Final = "seen:"  # + day: hash, id -> "stage\ngroup\nnumbers", what was counted of it
HOURS: Final = "hours:"  # + day: hash, "hour\tgroup" -> numbers
DAYS: Final = "days:"  # + month: hash, "day\tgroup" -> numbers


def prefix_of(tenant: str) -> str:
    return f"motet:{{tenant:{tenant}}}:ledger:"


# Seconds that an id, an hour and a day are kept; then for each entry: id, month, day, hour, stage, group, numbers and
# JSON.
# The entry is merged with what was counted of its id, as `merged` in entry.py says, and the sums change by the
# difference. Returns how many entries changed something.
TAKE_SCRIPT: Final = f"""
local function numbers_of(text)
  local found = {{}}
  for number in string.gmatch(text, '%S+') do found[#found + 1] = tonumber(number) end
  return found
end
local function add(key, field, sign, numbers)
  local held = redis.call('HGET', key, field)
  local sums, is_empty, shown = held and numbers_of(held) or {{}}, true, {{}}
  for i = 1, math.max(#sums, #numbers) do
    local sum = (sums[i] or 0) + sign * (numbers[i] or 0)
    if sum ~= 0 then is_empty = false end
    shown[i] = string.format('%.0f', sum)
  end
  if is_empty then redis.call('HDEL', key, field) else redis.call('HSET', key, field, table.concat(shown, ' ')) end
end
local function is_before(one, other)  -- by bytes: Lua's own order is the locale's
  for i = 1, math.min(#one, #other) do
    local a, b = string.byte(one, i), string.byte(other, i)
    if a ~= b then return a < b end
  end
  return #one < #other
end
local prefix, num_changed, touched = KEYS[1], 0, {{}}
for i = 4, #ARGV, 8 do
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
    if is_before(old_group, group) then group = old_group end
  end
  local shown = {{}}
  for j, number in ipairs(numbers) do shown[j] = string.format('%.0f', number) end
  local now = string.format('%d\\n%s\\n%s', stage, group, table.concat(shown, ' '))
  if now ~= before then
    num_changed = num_changed + 1
    redis.call('HSET', seen, id, now)
    touched[seen] = ARGV[1]
    local hours, days = {{'{HOURS}' .. day, hour, ARGV[2]}}, {{'{DAYS}' .. month, string.sub(day, 7), ARGV[3]}}
    for _, place in ipairs({{hours, days}}) do
      local key = prefix .. place[1]
      touched[key] = place[3]
      if before then add(key, place[2] .. '\\t' .. old_group, -1, old) end
      add(key, place[2] .. '\\t' .. group, 1, numbers)
    end
    redis.call('XADD', prefix .. '{ENTRIES}', '*', 'e', ARGV[i + 7])
  end
end
for key, seconds in pairs(touched) do redis.call('EXPIRE', key, seconds) end
return num_changed
"""
