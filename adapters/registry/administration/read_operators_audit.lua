-- Looks at `count` of the operators' entries from `last` on, the newest first. Returns the id of the last of them
-- (empty: there are no more), then id, entry and result of each that is about the tenant.
-- KEYS: audit
-- ARGV: last, count, tenant
local entries = redis.call('XREVRANGE', audit, last, '-', 'COUNT', count)
local found = {#entries == tonumber(count) and entries[#entries][1] or ''}
for _, entry in ipairs(entries) do
  if entry[2][2] == tenant then
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2][4]
    found[#found + 1] = entry[2][6]
  end
end
return found
