-- Reads one hash of a day's records: returns the next one's start (nothing: there is none), and field, record and group
-- of each.
-- include: packed_map.lua
-- KEYS: prefix
-- ARGV: day, first
local records = prefix .. 'records:' .. day
local fields, page = redis.call('HGETALL', records .. ':' .. first), {}
for i = 1, #fields, 2 do
  local number = string.match(fields[i + 1], '^%d [+-]?(%d+)')
  local place = #page
  page[place + 1], page[place + 2] = fields[i], fields[i + 1]
  page[place + 3] = redis.call('HGET', prefix .. 'groups:' .. day, number)
end
return {map_next(records, first) or false, page}
