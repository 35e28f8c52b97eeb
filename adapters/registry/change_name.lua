-- Replaces what the registry has of a name, if that is still as it was read, and returns the new record.
-- Otherwise changes nothing and returns
--   nil: the name has changed meanwhile;
--   0: the tenant that asks (`incarnation`; empty: any) is being deleted, or was, or `user` or the `owner` was;
--   1: its tenant has `max_canaries` canaries already;
--   {'pinned_bytes', bytes, most}, {'pins', most} or {'pins_in_all', most}: too much would be pinned;
--   {owner, adapters, bytes, more adapters, more bytes}: one of `bounds` would be exceeded.
-- `head` is the record up to its facts; `facts` are JSON without brace and revision.
-- include: events.lua, audit.lua, deleted_callers.lua, stored_counts.lua, pins.lua
-- KEYS: adapters, names, versions, version_notes, canaries
-- ARGV: field, owner, old_record, old_version, old_notes, head, facts, new_version, new_notes, has_canary
-- ARGV: entry, result, max_canaries, max_pins, max_pins_in_all, max_pinned_bytes, bounds[]
local tenant = string.match(field, '^[^/]*')
local tenant_record = redis.call('HGET', tenants, tenant)
if tenant_record then tenant_record = cjson.decode(tenant_record) end
if incarnation ~= '' and is_deleted(tenant, owner) then return 0 end
if (redis.call('HGET', adapters, field) or '') ~= old_record
    or (redis.call('HGET', versions, field) or '0') ~= old_version
    or (redis.call('HGET', version_notes, field) or '') ~= old_notes then return false end
if has_canary == '1' and not redis.call('ZSCORE', canaries, field)
    and redis.call('ZLEXCOUNT', canaries, '[' .. tenant .. '/', '(' .. tenant .. '0') >= tonumber(max_canaries) then
  return 1
end
local record = head .. '{"revision":' .. string.format('%d', next_event_number()) .. ',' .. facts

local function exceeded_pins(change)
  if change.adds_bytes then
    local quota = tenant_record and tenant_record.quota and tenant_record.quota.pinned_bytes
    for _, bound in ipairs({tonumber(max_pinned_bytes) or math.huge, type(quota) == 'number' and quota or nil}) do
      if change.num_bytes > bound then
        return {'pinned_bytes', string.format('%.0f', change.num_bytes), string.format('%.0f', bound)}
      end
    end
  end
  if change.is_new then
    if change.num_pins > tonumber(max_pins) then return {'pins', max_pins} end
    if redis.call('HLEN', pins) >= tonumber(max_pins_in_all) then return {'pins_in_all', max_pins_in_all} end
  end
end

local pin = pin_change(tenant, old_record, record)
local stored = count_changes(tenant, old_record, old_notes, record, new_notes)
local exceeded = pin and exceeded_pins(pin) or exceeded_bound(tenant, stored, bounds)
if exceeded then return exceeded end
write_pin_change(tenant, field, pin)
write_count_changes(tenant, stored, next_event_number())
redis.call('HSET', adapters, field, record)
redis.call('ZADD', names, 0, field)
redis.call('HSET', versions, field, new_version)
if new_notes == '' then
  redis.call('HDEL', version_notes, field)
else
  redis.call('HSET', version_notes, field, new_notes)
end
if has_canary == '1' then redis.call('ZADD', canaries, 0, field) else redis.call('ZREM', canaries, field) end
publish('set', field, record)
append_audit(tenant, entry, result)
return record
