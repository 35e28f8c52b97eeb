-- Deletes at most `count` of the tenant's adapters, with the counts and comments of their trials, and returns how many
-- it has deleted. No text in a record or in notes has the quotes that are around a trial's id.
-- include: ../events.lua
-- KEYS: adapters, names, version_notes, canaries, pins, pinned, stored_prefix, answers, answer_order
-- KEYS: counts_prefix, comments_prefix, sticky_prefix, updated_trials, unswept_prefix, unswept_tenants
-- ARGV: tenant, count
local function delete_trials(text)
  for trial in string.gmatch(text, '"id":"(%x+)"') do
    redis.call('UNLINK', counts_prefix .. trial, comments_prefix .. trial, sticky_prefix .. trial)
    redis.call('HDEL', updated_trials, trial)
  end
end

local fields = redis.call('ZRANGEBYLEX', names, '[' .. tenant .. '/', '(' .. tenant .. '0', 'LIMIT', 0, count)
for _, field in ipairs(fields) do
  local record = redis.call('HGET', adapters, field)
  redis.call('ZREM', names, field)
  if record then
    delete_trials(record)
    delete_trials(redis.call('HGET', version_notes, field) or '')
    redis.call('HDEL', adapters, field)
    redis.call('HDEL', version_notes, field)
    redis.call('ZREM', canaries, field)
    redis.call('HDEL', pins, field)
    publish('delete', field, string.match(record, '^%d+') .. ' ' .. string.format('%d', next_event_number()))
  end
end
if #fields < tonumber(count) then
  redis.call('HDEL', pinned, tenant)
  redis.call('UNLINK', stored_prefix .. tenant, unswept_prefix .. tenant, answers, answer_order)
  redis.call('SREM', unswept_tenants, tenant)
end
return #fields
