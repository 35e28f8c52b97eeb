-- Looks at `count` entries from `last` on, the newest first: at those of all logs, or with a `tenant` at operators' that
-- are about it. Returns the id of the last of them (empty: there are no more), then id, entry and result of each.
-- KEYS: audit, audit_order, tenant_audit_prefix
-- ARGV: tenant, last, count
local rows = redis.call('XREVRANGE', tenant == '' and audit_order or audit, last, '-', 'COUNT', count)
local found = {#rows == tonumber(count) and rows[#rows][1] or ''}
for _, row in ipairs(rows) do
  local id, entry = row[1], row
  if tenant == '' then
    local owner = row[2][2]
    entry = redis.call('XRANGE', owner == '' and audit or tenant_audit_prefix .. owner, id, id)[1]
  end
  if entry and (tenant == '' or entry[2][2] == tenant) then
    for _, part in ipairs({id, entry[2][4], entry[2][6]}) do found[#found + 1] = part end
  end
end
return found
