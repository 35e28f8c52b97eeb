-- Returns at most `count` different words, up to a slash, that follow `beginning` in names, in order: those behind
-- `after` (empty: all) and up to `stop`.
-- KEYS: names
-- ARGV: beginning, after, stop, count
local found, first = {}, '[' .. beginning
if after ~= '' then first = first .. after .. '0' end  -- '0' is the character after '/'
for i = 1, tonumber(count) do
  local name = redis.call('ZRANGEBYLEX', names, first, stop, 'LIMIT', 0, 1)[1]
  if not name then break end
  found[i] = string.match(name, '^[^/]*', #beginning + 1)
  first = '[' .. beginning .. found[i] .. '0'
end
return found
