-- `counts_still` of canary_policy.py, kept in a hash: what has counted for each sticky key and for all of them.
-- KEYS: sticky
-- ARGV: free_answers, answers_a_share, max_sticky_fields
local function counts_still(arm, kind, sticky_key)
  if sticky_key == '' then return true end
  local all_field = arm .. ' ' .. kind
  local own_field = all_field .. ' ' .. sticky_key
  local num_own = tonumber(redis.call('HGET', sticky, own_field) or '0')
  local num_all = tonumber(redis.call('HGET', sticky, all_field) or '0')
  if num_own >= tonumber(free_answers) + math.floor(num_all / tonumber(answers_a_share)) then return false end
  if redis.call('HLEN', sticky) >= tonumber(max_sticky_fields) then redis.call('UNLINK', sticky) end
  redis.call('HINCRBY', sticky, own_field, 1)
  redis.call('HINCRBY', sticky, all_field, 1)
  return true
end
