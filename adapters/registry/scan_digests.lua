-- Returns the next cursor and the first 16 digits of the digests of all versions of about `count` adapters, joined.
-- KEYS: adapters
-- ARGV: cursor, count
local page = redis.call('HSCAN', adapters, cursor, 'COUNT', count)
local found = {}
for i = 2, #page[2], 2 do
  local digest, facts = string.match(page[2][i], '^%d+ (%x+) (.*)$')
  found[#found + 1] = string.sub(digest, 1, 16)
  if string.find(facts, '"others"', 1, true) then
    for _, other in ipairs(cjson.decode(facts)['rollout']['others']) do
      found[#found + 1] = string.sub(other[2], 1, 16)
    end
  end
end
return {page[1], table.concat(found)}
