-- Sets a key that has no value yet. Returns the value that it had; nil: none.
-- KEYS: key
-- ARGV: value
return redis.call('SET', key, value, 'NX', 'GET')
