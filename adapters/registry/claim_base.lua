-- Records the registry's base if it has none, or if it may change (1) and the registry has no adapters. Returns the
-- base that the registry has now.
-- KEYS: base, adapters
-- ARGV: wanted, may_change
if redis.call('SETNX', base, wanted) == 0 and may_change == '1' and redis.call('HLEN', adapters) == 0 then
  redis.call('SET', base, wanted)
end
return redis.call('GET', base)
