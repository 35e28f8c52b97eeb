-- Returns the newest event's id, its number, and the number of adapters with it; nil for what is missing.
-- KEYS: events, event_number, adapters
local newest = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)
return {newest[1] and newest[1][1] or false, redis.call('GET', event_number), redis.call('HLEN', adapters)}
