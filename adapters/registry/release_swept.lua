-- Counts no more what the tenant's names have lost and what is not on the disk for it any more.
-- `entries`: digest and its entry as it was read, in turn; one that has changed since stays.
-- include: stored_counts.lua
-- ARGV: tenant, entries[]
local changes = {counts = {}, unswept = {}}
for i = 1, #entries, 2 do
  if redis.call('HGET', unswept_prefix .. tenant, entries[i]) == entries[i + 1] then
    local unswept = parse_unswept(entries[i + 1])
    add_bytes(changes.counts, unswept, -unswept.num_bytes)
    changes.unswept[entries[i]] = false
  end
end
write_count_changes(tenant, changes)
if redis.call('EXISTS', unswept_prefix .. tenant) == 0 then redis.call('SREM', unswept_tenants, tenant) end
