-- Events that all routers follow.
-- KEYS: event_number, events
local NUM_EVENTS_KEPT = 10000

local function next_event_number()
  return tonumber(redis.call('GET', event_number) or '0') + 1
end

local function publish(kind, field, value)
  local number = redis.call('INCR', event_number)
  redis.call('XADD', events, 'MAXLEN', '~', NUM_EVENTS_KEPT, '*',
             'number', number, 'kind', kind, 'field', field, 'value', value)
  return number
end
