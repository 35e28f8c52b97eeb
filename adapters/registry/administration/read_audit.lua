-- Looks at `count` entries of all logs from `last` on, the newest first. Returns the id of the last of them (empty:
-- there are no more), then id, entry and result of each.
-- KEYS: audit, audit_order, tenant_audit_prefix
-- ARGV: last, count
local order = redis.call('XREVRANGE', audit_order, last, '-', 'COUNT', count)
local found = {#order == tonumber(count) and order[#order][1] or ''}
for _, place in ipairs(order) do
  local id, owner = place[1], place[2][2]
  local log = owner == '' and audit or tenant_audit_prefix .. owner
  local entry = redis.call('XRANGE', log, id, id)[1]
  if entry then
    found[#found + 1] = id
    found[#found + 1] = entry[2][4]
    found[#found + 1] = entry[2][6]
  end
end
return found
