-- Counts anew what the tenant that follows `previous` (empty: the first) has stored. Returns it; empty: there is none.
-- include: stored_counts.lua
-- KEYS: names, adapters, version_notes
-- ARGV: previous
local first = '-'
if previous ~= '' then first = '[' .. previous .. '0' end  -- '0' is the character after '/'
local next_name = redis.call('ZRANGEBYLEX', names, first, '+', 'LIMIT', 0, 1)[1]
if not next_name then return '' end
local tenant, counts = string.match(next_name, '^[^/]*'), {}
for _, field in ipairs(redis.call('ZRANGEBYLEX', names, '[' .. tenant .. '/', '(' .. tenant .. '0')) do
  local versions = versions_of(redis.call('HGET', adapters, field) or '', redis.call('HGET', version_notes, field) or '')
  add_versions(counts, versions, 1)
end
for _, text in ipairs(redis.call('HVALS', unswept_prefix .. tenant)) do
  local unswept = parse_unswept(text)
  add_bytes(counts, unswept, unswept.num_bytes)
end
redis.call('DEL', stored_prefix .. tenant)
for owner, count in pairs(counts) do write_count(tenant, owner, count[1], count[2]) end
return tenant
