-- Looks at `count` tenants that follow `previous` (empty: from the first), skipping their other adapters. Returns the
-- last of them (empty: there are no more), then those that have an adapter of this name.
-- KEYS: names
-- ARGV: previous, name, count
local tenant, found = previous, {''}
for _ = 1, tonumber(count) do
  local first = '-'
  if tenant ~= '' then first = '[' .. tenant .. '0' end
  local next_name = redis.call('ZRANGEBYLEX', names, first, '+', 'LIMIT', 0, 1)[1]
  if not next_name then return found end
  tenant = string.match(next_name, '^[^/]*')
  if redis.call('ZSCORE', names, tenant .. '/' .. name) then found[#found + 1] = tenant end
end
found[1] = tenant
return found
