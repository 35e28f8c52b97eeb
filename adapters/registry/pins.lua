-- What each tenant has pinned: the bytes of the pages of a pinned name's current version, once for each gang that keeps it.
-- A version from before pages were recorded counts its tensors.
-- KEYS: pins, pinned
local function pin_of(record)  -- returns digest, gangs and bytes; nil, 0, 0: it is not pinned
  if not string.find(record, '"pinned_gangs"', 1, true) then return nil, 0, 0 end
  local digest, text = string.match(record, '^%d+ (%x+) (.*)$')
  local facts = cjson.decode(text)
  local gangs = facts.rollout.pinned_gangs
  if not gangs then return nil, 0, 0 end
  return digest, gangs, gangs * (facts.packed_bytes or facts.num_bytes)
end

local function pin_change(tenant, before, after)  -- returns nil if neither record is pinned
  local old_digest, _, old_bytes = pin_of(before)
  local digest, gangs, bytes = pin_of(after)
  if not (old_digest or digest) then return nil end
  local num_pins, sum = string.match(redis.call('HGET', pinned, tenant) or '0 0', '(%S+) (%S+)')
  return {
    digest = digest,
    gangs = gangs,
    is_new = digest and not old_digest,
    adds_bytes = bytes > old_bytes,
    num_pins = tonumber(num_pins) + (digest and 1 or 0) - (old_digest and 1 or 0),
    num_bytes = tonumber(sum) + bytes - old_bytes,
  }
end

local function write_pin_change(tenant, field, change)
  if not change then return end
  if change.digest then
    redis.call('HSET', pins, field, change.digest .. ' ' .. string.format('%d', change.gangs))
  else
    redis.call('HDEL', pins, field)
  end
  if change.num_pins == 0 then
    redis.call('HDEL', pinned, tenant)
  else
    redis.call('HSET', pinned, tenant, string.format('%d %.0f', change.num_pins, change.num_bytes))
  end
end
