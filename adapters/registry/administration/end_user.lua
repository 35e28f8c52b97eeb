-- include: ../events.lua
-- KEYS: ended_users_prefix
local NUM_ENDED_USERS_KEPT = 10000
local ENDED_USERS_KEPT_S = 7 * 86400  -- no request is under way for so long

local function end_user(tenant, user)  -- requests that were admitted before this event leave nothing of the user
  local ended = ended_users_prefix .. tenant
  redis.call('ZADD', ended, publish('user', tenant .. '/' .. user, ''), user)
  if redis.call('ZCARD', ended) > NUM_ENDED_USERS_KEPT then  -- the oldest are one entry, which counts for all users
    local number = redis.call('ZRANGE', ended, 1, 1, 'WITHSCORES')[2]
    redis.call('ZREMRANGEBYRANK', ended, 0, 1)
    redis.call('ZADD', ended, number, '')
  end
  redis.call('EXPIRE', ended, ENDED_USERS_KEPT_S)
end
