-- Counts one more heartbeat of a launch. Returns all launches and how many each has sent.
-- KEYS: launches
-- ARGV: launch
redis.call('HINCRBY', launches, launch, 1)
return redis.call('HGETALL', launches)
