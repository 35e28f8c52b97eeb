-- Returns field and record, in turn, of at most `count` of the tenant's adapters: those that follow the name `after`
-- (empty: from the first).
-- KEYS: adapters, names
-- ARGV: tenant, after, count
local first = '[' .. tenant .. '/'
if after ~= '' then first = '(' .. tenant .. '/' .. after end
local found = {}
for _, field in ipairs(redis.call('ZRANGEBYLEX', names, first, '(' .. tenant .. '0', 'LIMIT', 0, count)) do
  found[#found + 1] = field
  found[#found + 1] = redis.call('HGET', adapters, field)
end
return found
