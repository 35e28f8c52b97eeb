-- Takes in entries of one tenant. Returns how many changed something.
--
-- An entry is merged with the record of its id, as `merged` in entry.py does, and the sums of its hour and day change by
-- the difference. ledger.py says what each key holds.
-- include: packed_map.lua, without_user.lua
-- KEYS: prefix
-- ARGV: hour_seconds, day_seconds, max_groups, max_user_groups, others, digest_digits, entries[]
local ENTRY_LENGTH = 10  -- arguments: field, id, month, day, hour, second, stage, group, numbers, error
local REQUESTS, CUT_OFF, PROMPT, CACHED = 1, 2, 3, 4  -- places in the numbers of an entry

local function parse_numbers(text)
  local numbers = {}
  for number in string.gmatch(text, '%S+') do numbers[#numbers + 1] = tonumber(number) end
  return numbers
end

local function write_numbers(numbers, num_shown)
  local shown = {}
  for i = 1, num_shown do shown[i] = string.format('%.0f', numbers[i]) end
  return table.concat(shown, ' ')
end

-- An entry is summed with its group, with `+` with that of all users of its adapter, with `-` with `others`.
local function summed_group(entry)
  if entry.sign == '-' then return others end
  local names, digest = string.match(entry.group, '^(.*\t)([^\t]*)$')
  local group = names .. string.sub(digest, 1, tonumber(digest_digits))
  return entry.sign == '+' and is_of_one_user(group) and without_user(group) or group
end

local function group_number(groups, group)
  local number = redis.call('HGET', groups, group)
  if not number then
    number = redis.call('HLEN', groups) / 2 + 1
    redis.call('HSET', groups, group, number, number, group)
  end
  return number
end

local function read_record(day, record)
  local stage, sign, number, numbers, error = string.match(record, '^(%d) ([+-]?)(%d+) %d+ ([^\t]*)\t?(.*)$')
  return {
    stage = tonumber(stage),
    group = redis.call('HGET', prefix .. 'groups:' .. day, number),
    sign = sign,
    numbers = parse_numbers(numbers),
    error = error,
  }
end

local function write_record(entry, day, second)
  local number = group_number(prefix .. 'groups:' .. day, entry.group)
  local num_shown = #entry.numbers
  while num_shown > 1 and entry.numbers[num_shown] == 0 do num_shown = num_shown - 1 end
  local record = string.format(
    '%d %s%d %s %s', entry.stage, entry.sign, number, second, write_numbers(entry.numbers, num_shown)
  )
  return entry.error == '' and record or record .. '\t' .. entry.error
end

-- What a version before records noted of the id. It expires by itself.
local function read_seen(day, id)
  local seen = redis.call('HGET', prefix .. 'seen:' .. day, id)
  if not seen then return nil end
  local stage, group, numbers = string.match(seen, '^(%d)\n([^\n]*)\n(.*)$')
  return {
    stage = tonumber(stage), group = group, sign = group == others and '-' or '', numbers = parse_numbers(numbers),
    error = '',
  }
end

local function merged(one, other)
  local numbers = {}
  for i = 1, math.max(#one.numbers, #other.numbers) do
    numbers[i] = math.max(one.numbers[i] or 0, other.numbers[i] or 0)
  end
  local function computed(entry) return (entry.numbers[PROMPT] or 0) - (entry.numbers[CACHED] or 0) end
  if #numbers >= CACHED then numbers[CACHED] = numbers[PROMPT] - math.max(computed(one), computed(other)) end
  local error = is_before(one.error, other.error) and other.error or one.error
  if one.stage ~= other.stage then
    local later = one.stage > other.stage and one or other
    numbers[REQUESTS], numbers[CUT_OFF] = later.numbers[REQUESTS] or 0, later.numbers[CUT_OFF] or 0
    error = later.error
  end
  return {
    stage = math.max(one.stage, other.stage),
    group = is_before(one.group, other.group) and one.group or other.group,
    sign = one.sign,
    numbers = numbers,
    error = error,
  }
end

local function add(sums, group, sign, numbers)
  local field = sums.place .. '\t' .. group
  local held = redis.call('HGET', sums.key, field)
  local total, is_empty = held and parse_numbers(held) or {}, true
  for i = 1, math.max(#total, #numbers) do
    total[i] = (total[i] or 0) + sign * (numbers[i] or 0)
    if total[i] ~= 0 then is_empty = false end
  end
  local more
  if is_empty then more = -redis.call('HDEL', sums.key, field)
  else more = redis.call('HSET', sums.key, field, write_numbers(total, #total)) end
  if sums.counts_groups and more ~= 0 then redis.call('HINCRBY', sums.key, sums.place .. '\t', more) end
end

local function has_room(sums, group)
  if redis.call('HEXISTS', sums.key, sums.place .. '\t' .. group) == 1 then return true end
  local most = is_of_one_user(group) and max_user_groups or max_groups
  return tonumber(redis.call('HGET', sums.key, sums.place .. '\t') or 0) < tonumber(most)
end

local num_changed, changed_days, seconds_kept = 0, {}, {}
for i = 1, #entries, ENTRY_LENGTH do
  local field, id, month, day, hour, second = unpack(entries, i, i + 5)
  local entry = {
    stage = tonumber(entries[i + 6]), group = entries[i + 7], numbers = parse_numbers(entries[i + 8]),
    error = entries[i + 9], sign = '',
  }
  local records = prefix .. 'records:' .. day
  local hours = {key = prefix .. 'hours:' .. day, place = hour}
  local days = {key = prefix .. 'days:' .. month, place = string.sub(day, 7), counts_groups = true}
  local record = map_get(records, field)
  local known = record and read_record(day, record) or read_seen(day, id)
  if known then entry = merged(known, entry) end
  local group = summed_group(entry)
  while entry.sign ~= '-' and not (known and group == summed_group(known)) and not has_room(days, group) do
    entry.sign = is_of_one_user(group) and '+' or '-'
    group = summed_group(entry)
  end
  local new_record = write_record(entry, day, second)
  if new_record ~= record then
    num_changed = num_changed + 1
    map_set(records, field, new_record)
    for _, sums in ipairs({hours, days}) do
      if known then add(sums, summed_group(known), -1, known.numbers) end
      add(sums, group, 1, entry.numbers)
    end
    changed_days[day], seconds_kept[hours.key], seconds_kept[days.key] = true, hour_seconds, day_seconds
  end
end
local time = redis.call('TIME')
for day in pairs(changed_days) do
  redis.call('ZADD', prefix .. 'pending', string.format('%s%06d', time[1], time[2]), day)
end
for key, seconds in pairs(seconds_kept) do redis.call('EXPIRE', key, seconds) end
return num_changed
