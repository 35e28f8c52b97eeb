-- What was under way when its tenant or its user was deleted leaves nothing to the next one of that name.
-- KEYS: tenants, ended_users_prefix
-- ARGV: user, incarnation, last_event
local function is_deleted(tenant)  -- the tenant or the user of a request, since that was admitted
  local record = redis.call('HGET', tenants, tenant)
  if record then
    record = cjson.decode(record)
    if record.is_ending or (record.num_ended or 0) ~= tonumber(incarnation) then return true end
  end
  if user == '' then return false end
  local ended = ended_users_prefix .. tenant
  local number = redis.call('ZSCORE', ended, user) or redis.call('ZSCORE', ended, '')
  return number and tonumber(number) > tonumber(last_event)
end
