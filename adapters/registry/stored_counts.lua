-- What each tenant stores, and what of that was uploaded with each of its keys, and is each user's. Counts are by owner: ''
-- is the tenant, a key's id the key, and '~user' a user. A name counts once for its tenant and once for each key and user
-- of its versions; each version counts the bytes of its tensors and of its pages.
-- Versions from before pages were recorded have no `packed_bytes`: they count, and give back, their tensors alone.
--
-- Content that a name no longer has stays on the disk until it is swept, and counts until then: `unswept_prefix` .. tenant
-- has "event bytes key_id user" by digest (without " user": it was no user's), where the event is the newest one by which a name of the tenant has lost it.
-- Files are counted apart, in `file_bytes_prefix` .. tenant: bytes by owner. A bound of bytes is for both together.
-- KEYS: stored_prefix, unswept_prefix, unswept_tenants, file_bytes_prefix
local function add_count(counts, owner, num_adapters, num_bytes)
  local count = counts[owner] or {0, 0}
  counts[owner] = {count[1] + num_adapters, count[2] + num_bytes}
end

local function owners_of(content)  -- of a version, or of what is unswept
  local owners = {''}
  if content.key_id ~= '' then owners[#owners + 1] = content.key_id end
  if content.user ~= '' then owners[#owners + 1] = '~' .. content.user end
  return owners
end

local function add_bytes(counts, content, num_bytes)
  for _, owner in ipairs(owners_of(content)) do add_count(counts, owner, 0, num_bytes) end
end

local function versions_of(record, notes)  -- a list of {digest, num_bytes, key_id, user}
  if record == '' then return {} end
  local current, digest, text = string.match(record, '^(%d+) (%x+) (.*)$')
  local facts = cjson.decode(text)
  local version_notes = notes ~= '' and cjson.decode(notes).versions or {}
  local function version(number, its_digest, num_bytes)
    local note = version_notes[number]
    return {
      digest = its_digest, num_bytes = num_bytes, key_id = note and note.uploaded_by or '', user = note and note.user or ''
    }
  end
  local versions = {version(current, digest, facts.num_bytes + (facts.packed_bytes or 0))}
  for _, other in ipairs(facts.rollout and facts.rollout.others or {}) do
    versions[#versions + 1] = version(string.format('%d', other[1]), other[2], other[3] + (other[6] or 0))
  end
  return versions
end

local function add_versions(counts, versions, sign)  -- of one name
  local has_counted = {}
  for _, version in ipairs(versions) do
    add_bytes(counts, version, sign * version.num_bytes)
    for _, owner in ipairs(owners_of(version)) do
      if not has_counted[owner] then add_count(counts, owner, sign, 0) end
      has_counted[owner] = true
    end
  end
end

local function parse_unswept(text)  -- nil for nil
  if not text then return nil end
  local num_bytes, key_id, user = string.match(text, '^%d+ (%d+) (%S*) ?(.*)$')
  return {num_bytes = tonumber(num_bytes), key_id = key_id, user = user}
end

local function read_unswept(tenant, digest)
  return parse_unswept(redis.call('HGET', unswept_prefix .. tenant, digest) or nil)
end

local function read_count(tenant, owner)
  local adapters, bytes = string.match(redis.call('HGET', stored_prefix .. tenant, owner) or '0 0', '(%S+) (%S+)')
  return tonumber(adapters), tonumber(bytes)
end

local function read_file_bytes(tenant, owner)
  return tonumber(redis.call('HGET', file_bytes_prefix .. tenant, owner) or 0)
end

local function write_count(tenant, owner, num_adapters, num_bytes)
  if num_adapters == 0 and num_bytes == 0 then
    redis.call('HDEL', stored_prefix .. tenant, owner)
  else
    redis.call('HSET', stored_prefix .. tenant, owner, string.format('%d %.0f', num_adapters, num_bytes))
  end
end

-- Returns {counts, unswept}: what is added by owner, and by digest what is unswept now, or false if it no longer is.
local function count_changes(tenant, before, notes_before, after, notes_after)
  local old, new = versions_of(before, notes_before), versions_of(after, notes_after)
  local changes, lost, gained = {counts = {}, unswept = {}}, {}, {}
  add_versions(changes.counts, old, -1)
  add_versions(changes.counts, new, 1)
  for _, version in ipairs(old) do lost[version.digest] = version end
  for _, version in ipairs(new) do gained[version.digest] = not lost[version.digest] or nil end
  for _, version in ipairs(new) do lost[version.digest] = nil end
  for digest, version in pairs(lost) do
    local unswept = read_unswept(tenant, digest)
    if not unswept then
      unswept = version
      add_bytes(changes.counts, version, version.num_bytes)
    end
    changes.unswept[digest] = unswept
  end
  for digest in pairs(gained) do
    local unswept = read_unswept(tenant, digest)
    if unswept then
      add_bytes(changes.counts, unswept, -unswept.num_bytes)
      changes.unswept[digest] = false
    end
  end
  return changes
end

-- `bounds`: owner, most adapters, most bytes (empty: no bound), in turn. Returns nil, or the first owner whose bound
-- would be exceeded, with what it has and what would be added.
local function exceeded_bound(tenant, changes, bounds)
  for i = 1, #bounds, 3 do
    local owner, max_adapters, max_bytes = bounds[i], bounds[i + 1], bounds[i + 2]
    local change = changes.counts[owner] or {0, 0}
    local adapters, bytes = read_count(tenant, owner)
    bytes = bytes + read_file_bytes(tenant, owner)
    if (max_adapters ~= '' and change[1] > 0 and adapters + change[1] > tonumber(max_adapters))
        or (max_bytes ~= '' and change[2] > 0 and bytes + change[2] > tonumber(max_bytes)) then
      return {owner, adapters, string.format('%.0f', bytes), change[1], string.format('%.0f', change[2])}
    end
  end
end

local function write_count_changes(tenant, changes, event)  -- `event`: the number of the change's own
  for owner, change in pairs(changes.counts) do
    local adapters, bytes = read_count(tenant, owner)
    write_count(tenant, owner, adapters + change[1], bytes + change[2])
  end
  local unswept_key = unswept_prefix .. tenant
  for digest, unswept in pairs(changes.unswept) do
    if unswept then
      local text = string.format('%d %.0f %s', event, unswept.num_bytes, unswept.key_id)
      if unswept.user ~= '' then text = text .. ' ' .. unswept.user end
      redis.call('HSET', unswept_key, digest, text)
      redis.call('SADD', unswept_tenants, tenant)
    else
      redis.call('HDEL', unswept_key, digest)
    end
  end
end
