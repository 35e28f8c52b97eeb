-- API keys and the launches that give them.
-- KEYS: launch_keys
local function tenant_of_key(record)  -- a record is JSON, or the tenant's bare name
  if string.sub(record, 1, 1) == '{' then return cjson.decode(record).tenant end
  return record
end

local function count_launches()  -- returns how many launches give each key, by its hash
  local num_launches = {}
  for _, mark in ipairs(redis.call('SMEMBERS', launch_keys)) do
    local hash = string.match(mark, '%x+$')
    num_launches[hash] = (num_launches[hash] or 0) + 1
  end
  return num_launches
end

local function remove_launch_marks(hashes)  -- of the keys whose hashes are the table's fields
  if not next(hashes) then return end
  for _, mark in ipairs(redis.call('SMEMBERS', launch_keys)) do
    if hashes[string.match(mark, '%x+$')] then redis.call('SREM', launch_keys, mark) end
  end
end
