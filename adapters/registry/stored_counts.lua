-- What each tenant stores, and what of that was uploaded with each of its keys. A name counts once for its tenant and
-- once for each key that has uploaded one of its versions; each version counts the bytes of its tensors and of its pages.
-- Versions from before pages were recorded have no `packed_bytes`: they count, and give back, their tensors alone.
-- KEYS: stored_prefix
local function add_count(counts, key_id, num_adapters, num_bytes)  -- empty key_id: the tenant
  local count = counts[key_id] or {0, 0}
  counts[key_id] = {count[1] + num_adapters, count[2] + num_bytes}
end

local function add_name(counts, record, notes, sign)
  if record == '' then return end
  local current, text = string.match(record, '^(%d+) %x+ (.*)$')
  local facts = cjson.decode(text)
  local versions = {{current, facts.num_bytes + (facts.packed_bytes or 0)}}
  for _, other in ipairs(facts.rollout and facts.rollout.others or {}) do
    versions[#versions + 1] = {string.format('%d', other[1]), other[3] + (other[6] or 0)}
  end
  local version_notes_of = notes ~= '' and cjson.decode(notes).versions or {}
  local has_counted = {}
  add_count(counts, '', sign, 0)
  for _, version in ipairs(versions) do
    local number, num_bytes = version[1], version[2]
    local key_id = version_notes_of[number] and version_notes_of[number].uploaded_by or ''
    add_count(counts, '', 0, sign * num_bytes)
    if key_id ~= '' then
      add_count(counts, key_id, has_counted[key_id] and 0 or sign, sign * num_bytes)
      has_counted[key_id] = true
    end
  end
end

local function read_count(tenant, key_id)
  local adapters, bytes = string.match(redis.call('HGET', stored_prefix .. tenant, key_id) or '0 0', '(%S+) (%S+)')
  return tonumber(adapters), tonumber(bytes)
end

local function write_count(tenant, key_id, num_adapters, num_bytes)
  if num_adapters == 0 and num_bytes == 0 then
    redis.call('HDEL', stored_prefix .. tenant, key_id)
  else
    redis.call('HSET', stored_prefix .. tenant, key_id, string.format('%d %.0f', num_adapters, num_bytes))
  end
end

local function count_changes(before, notes_before, after, notes_after)
  local changes = {}
  add_name(changes, before, notes_before, -1)
  add_name(changes, after, notes_after, 1)
  return changes
end

-- `bounds`: key_id, most adapters, most bytes (empty: no bound), in turn. Returns nil, or the first key_id whose bound
-- would be exceeded, with what it has and what would be added.
local function exceeded_bound(tenant, changes, bounds)
  for i = 1, #bounds, 3 do
    local key_id, max_adapters, max_bytes = bounds[i], bounds[i + 1], bounds[i + 2]
    local change = changes[key_id] or {0, 0}
    local adapters, bytes = read_count(tenant, key_id)
    if (max_adapters ~= '' and change[1] > 0 and adapters + change[1] > tonumber(max_adapters))
        or (max_bytes ~= '' and change[2] > 0 and bytes + change[2] > tonumber(max_bytes)) then
      return {key_id, adapters, string.format('%.0f', bytes), change[1], string.format('%.0f', change[2])}
    end
  end
end

local function write_count_changes(tenant, changes)
  for key_id, change in pairs(changes) do
    local adapters, bytes = read_count(tenant, key_id)
    write_count(tenant, key_id, adapters + change[1], bytes + change[2])
  end
end
