-- The audit log. Each tenant has a log of its own, so that it cannot push out the entries of others.
-- KEYS: audit, audit_order, tenant_audit_prefix
local NUM_OPERATOR_ENTRIES_KEPT = 100000
local NUM_TENANT_ENTRIES_KEPT = 1000

local function append_audit(tenant, entry, result)  -- an empty entry is not written
  if entry == '' then return end
  local kind = cjson.decode(entry).actor.kind
  local owner, log, max_entries = '', audit, NUM_OPERATOR_ENTRIES_KEPT
  if kind ~= 'operator' and kind ~= 'configuration' then
    owner, log, max_entries = tenant, tenant_audit_prefix .. tenant, NUM_TENANT_ENTRIES_KEPT
  end
  local id = redis.call('XADD', audit_order, '*', 'whose', owner)
  redis.call('XADD', log, id, 'tenant', tenant, 'entry', entry, 'result', result)
  if redis.call('XLEN', log) > max_entries then
    local oldest = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1][1]
    redis.call('XDEL', log, oldest)
    redis.call('XDEL', audit_order, oldest)
  end
end
