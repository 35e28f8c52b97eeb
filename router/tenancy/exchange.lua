-- Moves units of one limit between the tenant's budget and the grant of one router.
--
-- The hash `limit_key` has the bucket of the units that were used, as a queue in microseconds of its rate: it was filled
-- up to `tail` and has drained up to `head` at the moment `at`; `epoch` names it. A field for each router has what it
-- holds: "held in_use number lease_end". Units that are held are not in the bucket yet. Of answers at once nothing
-- drains: those that are made are `in_use`.
--
-- `held`, `in_use`: what the router has now. `used_us`: what it used since its last message. `refunds_us`: pairs of what
-- was reserved and not used, and the `tail` at which that was taken; what has drained of it does not come back.
-- `wanted`: units to grant, if there are at least `least`. `takeovers`: resumed streams, which may have the places of
-- other routers. A message that comes again, or after the router sent a newer one, changes nothing.
-- Returns 1 (0: the grant was given up when its lease ended), epoch, held, tail, backlog, held and in use elsewhere.
-- KEYS: limit_key
-- ARGV: router, number, lease_us, limit, is_rate, epoch, held, in_use, used_us, least, wanted, takeovers, refunds_us[]
local PERIOD_US = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local unit_us = PERIOD_US / limit
limit, wanted, number = tonumber(limit), tonumber(wanted), tonumber(number)

local bucket, holders = {epoch = now, at = now, head = 0, tail = 0}, {}
local fields = redis.call('HGETALL', limit_key)
for i = 1, #fields, 2 do
  if bucket[fields[i]] then
    bucket[fields[i]] = tonumber(fields[i + 1])
  else
    local has, uses, last, lease_end = string.match(fields[i + 1], '(%S+) (%S+) (%S+) (%S+)')
    holders[fields[i]] = {held = tonumber(has), in_use = tonumber(uses), number = tonumber(last), lease_end = tonumber(lease_end)}
  end
end
local function drain(moment)
  if moment > bucket.at then
    bucket.head, bucket.at = math.min(bucket.tail, bucket.head + moment - bucket.at), moment
  end
end
local ended = {}
for name, holder in pairs(holders) do
  if holder.lease_end < now then ended[#ended + 1] = name end
end
table.sort(ended, function(one, other) return holders[one].lease_end < holders[other].lease_end end)
for _, name in ipairs(ended) do -- of dead routers: they may have used their units until then
  drain(holders[name].lease_end)
  if is_rate == '1' then bucket.tail = bucket.tail + holders[name].held * unit_us end
  holders[name] = nil
  redis.call('HDEL', limit_key, name)
end
drain(now)
bucket.at = now

local mine = holders[router]
local is_new = not mine or mine.number < number
local is_lost = not mine and number > 1 and tonumber(epoch) == bucket.epoch
if is_new and not is_lost then
  mine = {held = tonumber(held), in_use = tonumber(in_use), number = number}
  holders[router] = mine
  bucket.tail = bucket.tail + used_us
  if tonumber(epoch) == bucket.epoch then
    for i = 1, #refunds_us, 2 do
      local back = math.min(refunds_us[i], math.min(refunds_us[i + 1], bucket.tail) - bucket.head)
      bucket.head = bucket.head + math.max(0, back)
    end
  end
end

local elsewhere, others = {held = 0, in_use = 0}, {}
for name, holder in pairs(holders) do
  if name ~= router then
    elsewhere.held, elsewhere.in_use = elsewhere.held + holder.held, elsewhere.in_use + holder.in_use
    if holder.in_use + holder.held > 0 then others[#others + 1] = name end
  end
end

if is_new and not is_lost then
  local backlog = is_rate == '1' and (bucket.tail - bucket.head) / unit_us or 0
  local free = math.floor(limit - backlog - mine.held - mine.in_use - elsewhere.held - elsewhere.in_use + 1e-6)
  if free < 0 then -- a lower limit, a debt, or streams that were resumed elsewhere
    mine.held = math.max(mine.held + free, -mine.in_use)
  elseif wanted > 0 and free >= tonumber(least) then
    mine.held = mine.held + math.min(wanted, free)
  else
    -- The places of a dead router have the earliest lease. A living one says again what it has in use.
    table.sort(others, function(one, other) return holders[one].lease_end < holders[other].lease_end end)
    local missing = tonumber(takeovers)
    for _, name in ipairs(others) do
      local holder = holders[name]
      for _, part in ipairs({'in_use', 'held'}) do -- a place that was granted may be in use by now
        local taken = math.min(missing, math.max(0, holder[part]))
        holder[part], elsewhere[part] = holder[part] - taken, elsewhere[part] - taken
        mine.held, missing = mine.held + taken, missing - taken
      end
      redis.call('HSET', limit_key, name,
        string.format('%d %d %d %.0f', holder.held, holder.in_use, holder.number, holder.lease_end))
    end
  end
end
if mine then
  redis.call('HSET', limit_key, 'epoch', string.format('%.0f', bucket.epoch), 'at', string.format('%.0f', now),
    'head', string.format('%.3f', bucket.head), 'tail', string.format('%.3f', bucket.tail),
    router, string.format('%d %d %d %.0f', mine.held, mine.in_use, mine.number, now + lease_us))
  redis.call('PEXPIRE', limit_key, math.ceil((bucket.tail - bucket.head + PERIOD_US + lease_us) / 1000))
end
return {
  mine and 1 or 0, bucket.epoch, mine and mine.held or 0, string.format('%.3f', bucket.tail),
  string.format('%.3f', bucket.tail - bucket.head), elsewhere.held, elsewhere.in_use,
}
