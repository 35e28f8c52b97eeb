-- Removes a day's records if none has changed since `changed`, and returns 1; else 0.
-- include: packed_map.lua
-- KEYS: prefix
-- ARGV: day, changed
local last = redis.call('ZSCORE', prefix .. 'pending', day)
if last and tonumber(last) ~= tonumber(changed) then return 0 end
map_remove(prefix .. 'records:' .. day)
redis.call('UNLINK', prefix .. 'groups:' .. day)
redis.call('ZREM', prefix .. 'pending', day)
return 1
