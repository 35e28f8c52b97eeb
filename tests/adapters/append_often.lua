-- Appends the same entry `count` times.
-- include: ../../adapters/registry/audit.lua
-- ARGV: tenant, entry, count
for i = 1, tonumber(count) do append_audit(tenant, entry, tostring(i)) end
