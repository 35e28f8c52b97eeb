-- What was under way when its tenant or its user was deleted leaves nothing to the next one of that name.
-- KEYS: tenants, ended_users_prefix
-- ARGV: user, incarnation, last_event
local function is_deleted(tenant, owner)  -- tenant or user of a request, or the owner (nil: none), since its admission
  local record = redis.call('HGET', tenants, tenant)
  if record then
    record = cjson.decode(record)
    if record.is_ending or (record.num_ended or 0) ~= tonumber(incarnation) then return true end
  end
  local ended = ended_users_prefix .. tenant
  for _, one in ipairs({user, owner}) do
    local number = one ~= '' and (redis.call('ZSCORE', ended, one) or redis.call('ZSCORE', ended, ''))
    if number and tonumber(number) > tonumber(last_event) then return true end
  end
  return false
end
