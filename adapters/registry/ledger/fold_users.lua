-- Adds up a month's sums of users, some at a time: what the users of an adapter used on a day becomes one row. Returns
-- the next cursor; nil: the month is folded, or there is none.
-- include: without_user.lua
-- KEYS: sums
-- ARGV: cursor, count
local FOLDED = 'folded'  -- a field without a tab is not a sum
local function parse_numbers(text)
  local numbers = {}
  for number in string.gmatch(text, '%S+') do numbers[#numbers + 1] = tonumber(number) end
  return numbers
end

if redis.call('EXISTS', sums) == 0 or redis.call('HEXISTS', sums, FOLDED) == 1 then return nil end
local found = redis.call('HSCAN', sums, cursor, 'COUNT', count)
local fields, added, num_fewer = found[2], {}, {}
for i = 1, #fields, 2 do
  local day, group = string.match(fields[i], '^(%d+)\t(.+)$')
  -- A field may come twice in a scan: then it has gone.
  if group and is_of_one_user(group) and redis.call('HDEL', sums, fields[i]) == 1 then
    local field = day .. '\t' .. without_user(group)
    local total = added[field] or {}
    for place, number in ipairs(parse_numbers(fields[i + 1])) do total[place] = (total[place] or 0) + number end
    added[field], num_fewer[day] = total, (num_fewer[day] or 0) + 1
  end
end
for field, total in pairs(added) do
  for place, number in ipairs(parse_numbers(redis.call('HGET', sums, field) or '')) do
    total[place] = (total[place] or 0) + number
  end
  for place, number in ipairs(total) do total[place] = string.format('%.0f', number) end
  local day = string.match(field, '^%d+')
  num_fewer[day] = num_fewer[day] - redis.call('HSET', sums, field, table.concat(total, ' '))
end
for day, fewer in pairs(num_fewer) do
  if fewer > 0 then redis.call('HINCRBY', sums, day .. '\t', -fewer) end -- Redis 7.0 does not take the -0 of Lua
end
if found[1] ~= '0' then return found[1] end
redis.call('HSET', sums, FOLDED, 1)
return nil
