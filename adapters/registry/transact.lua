-- Writes a change if what it was computed from is still the same, completely or not at all; store.py says what it holds.
-- Returns {'done', number of the last event before it}, or
--   {'conflict'}: a row is not what was read;
--   {'bound', place, sum}: these counters together are over the bound at this place.
-- KEYS: slot
-- ARGV: change
local checks, bounds, increases, writes, events, entries = unpack(cmsgpack.unpack(change))

local function reply_text(command)  -- to its second word and the further ones
  local reply = redis.call(unpack(command, 2))
  if type(reply) ~= 'table' then return tostring(reply or '') end
  for i, part in ipairs(reply) do reply[i] = tostring(part or '') end
  return table.concat(reply, '\n')
end

local function parse_numbers(text)
  local numbers = {}
  for number in string.gmatch(text, '%S+') do numbers[#numbers + 1] = tonumber(number) end
  return numbers
end

for _, check in ipairs(checks) do
  if reply_text(check) ~= check[1] then return {'conflict'} end
end
for place, bound in ipairs(bounds) do
  local sum = 0
  for i = 2, #bound do sum = sum + (parse_numbers(reply_text(bound[i]))[bound[i][1]] or 0) end
  if sum > bound[1] then return {'bound', place, string.format('%.0f', sum)} end
end

local last_event = events[1] and tonumber(redis.call('GET', events[1]) or '0') or 0
local function word_of(part)  -- a list is a text around the number of one of the change's events
  if type(part) ~= 'table' then return part end
  return part[1] .. string.format('%.0f', last_event + part[3]) .. part[2]
end
for _, increase in ipairs(increases) do
  local key, field, is_zero = increase[1], increase[2], true
  local numbers = parse_numbers(redis.call('HGET', key, field) or '')
  for i = 1, math.max(#numbers, #increase - 2) do
    local number = (numbers[i] or 0) + (increase[i + 2] or 0)
    is_zero, numbers[i] = is_zero and number == 0, string.format('%.0f', number)
  end
  if is_zero then redis.call('HDEL', key, field) else redis.call('HSET', key, field, table.concat(numbers, ' ')) end
end
for _, write in ipairs(writes) do
  for i, part in ipairs(write) do write[i] = word_of(part) end
  redis.call(unpack(write))
end
for i = 4, #events do
  local kind, field, value = unpack(events[i])
  redis.call('XADD', events[2], 'MAXLEN', '~', events[3], '*',
             'number', redis.call('INCR', events[1]), 'kind', kind, 'field', field, 'value', word_of(value))
end
for i = 2, #entries do
  local log, max_entries, owner, tenant, entry, result = unpack(entries[i])
  local id = redis.call('XADD', entries[1], '*', 'whose', owner)
  redis.call('XADD', log, id, 'tenant', tenant, 'entry', entry, 'result', result)
  if redis.call('XLEN', log) > max_entries then
    local oldest = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1][1]
    redis.call('XDEL', log, oldest)
    redis.call('XDEL', entries[1], oldest)
  end
end
return {'done', last_event}
