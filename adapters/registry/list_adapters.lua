-- Returns field and record, in turn, of at most `count` adapters: those whose fields are from `start` to `stop`.
-- KEYS: adapters, names
-- ARGV: start, stop, count
local found = {}
for _, field in ipairs(redis.call('ZRANGEBYLEX', names, start, stop, 'LIMIT', 0, count)) do
  found[#found + 1] = field
  found[#found + 1] = redis.call('HGET', adapters, field)
end
return found
