-- Counts a thumb, "up" or "down", for an answer of a trial, and returns 1; or 0, as it does not count.
-- include: sticky_bound.lua
-- KEYS: answers, counts, comments, updated_trials
-- ARGV: response_id, kept, trial, arm, sticky_key, thumb, comment, max_comments, counts_kept_s
if redis.call('HGET', answers, response_id) ~= kept then return 0 end
redis.call('HSET', answers, response_id, kept .. ' rated')
if not counts_still(arm, 'thumbs', sticky_key) then return 0 end
redis.call('HINCRBY', counts, arm .. ' ' .. thumb, 1)
redis.call('EXPIRE', counts, counts_kept_s)
if sticky_key ~= '' then redis.call('HINCRBY', updated_trials, trial, 1) end
if comment ~= '' then
  redis.call('LPUSH', comments, comment)
  redis.call('LTRIM', comments, 0, tonumber(max_comments) - 1)
  redis.call('EXPIRE', comments, counts_kept_s)
end
return 1
