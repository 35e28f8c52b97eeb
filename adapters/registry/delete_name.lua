-- Deletes a name with all its versions. Returns "version revision" of the deletion; nil: there is no such name; 0: the
-- tenant that asks (`incarnation`; empty: any), its `user` or the `owner` was deleted.
-- include: events.lua, audit.lua, deleted_callers.lua, stored_counts.lua, pins.lua
-- KEYS: adapters, names, version_notes, canaries
-- ARGV: field, owner, entry
local record = redis.call('HGET', adapters, field)
if not record then return false end
local tenant = string.match(field, '^[^/]*')
if incarnation ~= '' and is_deleted(tenant, owner) then return 0 end
local stored = count_changes(tenant, record, redis.call('HGET', version_notes, field) or '', '', '')
write_count_changes(tenant, stored, next_event_number())
write_pin_change(tenant, field, pin_change(tenant, record, ''))
redis.call('HDEL', adapters, field)
redis.call('ZREM', names, field)
redis.call('HDEL', version_notes, field)
redis.call('ZREM', canaries, field)
local version = string.match(record, '^%d+')
local deleted = version .. ' ' .. string.format('%d', next_event_number())
publish('delete', field, deleted)
append_audit(tenant, entry, version)
return deleted
