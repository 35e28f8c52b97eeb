-- Gives the lease to a holder for some milliseconds (0: ends it), and returns 1; or 0, as another one holds it.
-- KEYS: lease
-- ARGV: holder, milliseconds
local current = redis.call('GET', lease)
if current and current ~= holder then return 0 end
if tonumber(milliseconds) > 0 then
  redis.call('SET', lease, holder, 'PX', milliseconds)
else
  redis.call('DEL', lease)
end
return 1
