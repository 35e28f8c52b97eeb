-- Returns at most `count` users of the tenant who have private adapters, those that follow `after` (empty: from the first).
-- KEYS: names
-- ARGV: tenant, after, count
local beginning, found = tenant .. '/~', {}
local first = '[' .. beginning
if after ~= '' then first = '[' .. beginning .. after .. '0' end  -- '0' is the character after '/'
for _ = 1, tonumber(count) do
  local field = redis.call('ZRANGEBYLEX', names, first, '(' .. tenant .. '0', 'LIMIT', 0, 1)[1]
  if not field then return found end
  local user = string.match(field, '^[^/]*/~([^/]*)/')
  found[#found + 1] = user
  first = '[' .. beginning .. user .. '0'
end
return found
