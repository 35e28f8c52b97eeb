"""The Lua scripts of `canary_counts.py`. Each says what its KEYS and ARGV are."""

from __future__ import annotations

from typing import Final

from .versions.canary_policy import ANSWERS_A_SHARE, FREE_ANSWERS

_MAX_FIELDS: Final = 10_000  # of a trial's sticky keys; then all of them begin anew

# `counts_still` of the policy, kept in a hash: what counted of one sticky key, and of all, by arm and kind.
_TAKES: Final = f"""
local function takes(place, arm, kind, sticky)
  if sticky == '' then return true end
  local whole = arm .. ' ' .. kind
  local own = whole .. ' ' .. sticky
  local num = tonumber(redis.call('HGET', place, own) or '0')
  local all = tonumber(redis.call('HGET', place, whole) or '0')
  if num >= {FREE_ANSWERS} + math.floor(all / {ANSWERS_A_SHARE}) then return false end
  if redis.call('HLEN', place) >= {_MAX_FIELDS} then redis.call('UNLINK', place) end
  redis.call('HINCRBY', place, own, 1)
  redis.call('HINCRBY', place, whole, 1)
  return true
end
"""
# KEYS: answers, their order, counts, sticky keys, news. ARGV: response id, what is kept of the answer, id of the trial,
# arm, sticky key (empty: no bound, and no news), tenant/name, Unix time, most answers, seconds of answers, seconds of
# counts, then kind and count in turn. Returns 1 if the answer had not been told.
COUNT_SCRIPT: Final = f"""{_TAKES}
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[7], ARGV[1])
if redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[8]) then
  redis.call('HDEL', KEYS[1], redis.call('ZPOPMIN', KEYS[2])[1])
end
local arm, taken = ARGV[4], {{}}
for i = 11, #ARGV, 2 do
  local kind = ARGV[i]
  if taken[kind] == nil then taken[kind] = takes(KEYS[4], arm, kind, ARGV[5]) end
  if taken[kind] then redis.call('HINCRBY', KEYS[3], arm .. ' ' .. ARGV[i + 1], 1) end
end
if taken['answers'] == false then redis.call('HINCRBY', KEYS[3], arm .. ' uncounted', 1) end
redis.call('HSET', KEYS[3], 'of', ARGV[6])
if ARGV[5] ~= '' then redis.call('HINCRBY', KEYS[5], ARGV[3], 1) end
redis.call('EXPIRE', KEYS[1], ARGV[9])
redis.call('EXPIRE', KEYS[2], ARGV[9])
redis.call('EXPIRE', KEYS[4], ARGV[9])
redis.call('EXPIRE', KEYS[3], ARGV[10])
return 1
"""
# KEYS: answers, counts, comments, sticky keys, news. ARGV: response id, what is kept of the answer, id of the trial,
# arm, sticky key, "up" or "down", comment (empty: none), most comments, seconds of counts. Returns 1 if it counted.
RATE_SCRIPT: Final = f"""{_TAKES}
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' rated')
if not takes(KEYS[4], ARGV[4], 'thumbs', ARGV[5]) then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[4] .. ' ' .. ARGV[6], 1)
redis.call('EXPIRE', KEYS[2], ARGV[9])
if ARGV[5] ~= '' then redis.call('HINCRBY', KEYS[5], ARGV[3], 1) end
if ARGV[7] ~= '' then
  redis.call('LPUSH', KEYS[3], ARGV[7])
  redis.call('LTRIM', KEYS[3], 0, tonumber(ARGV[8]) - 1)
  redis.call('EXPIRE', KEYS[3], ARGV[9])
end
return 1
"""
# KEYS: news. ARGV: id of a trial and how much news there was of it, in turn. Forgets what there is no more of.
FORGET_NEWS_SCRIPT: Final = """
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then redis.call('HDEL', KEYS[1], ARGV[i]) end
end
"""
