-- Counts an answer of a trial, and returns 1; or 0, as it was counted before. `kept` is what is stored of the answer.
-- An empty sticky key has no bound, and its trial is not marked for the judge.
-- include: sticky_bound.lua
-- KEYS: answers, answer_order, counts, updated_trials
-- ARGV: response_id, kept, trial, arm, sticky_key, field, now, max_answers, answers_kept_s, counts_kept_s
-- ARGV: kinds_and_counts[]
if redis.call('HSETNX', answers, response_id, kept) == 0 then return 0 end
redis.call('ZADD', answer_order, now, response_id)
if redis.call('ZCARD', answer_order) > tonumber(max_answers) then
  redis.call('HDEL', answers, redis.call('ZPOPMIN', answer_order)[1])
end
local is_counted = {}
for i = 1, #kinds_and_counts, 2 do
  local kind, count = kinds_and_counts[i], kinds_and_counts[i + 1]
  if is_counted[kind] == nil then is_counted[kind] = counts_still(arm, kind, sticky_key) end
  if is_counted[kind] then redis.call('HINCRBY', counts, arm .. ' ' .. count, 1) end
end
if is_counted['answers'] == false then redis.call('HINCRBY', counts, arm .. ' uncounted', 1) end
redis.call('HSET', counts, 'of', field)
if sticky_key ~= '' then redis.call('HINCRBY', updated_trials, trial, 1) end
redis.call('EXPIRE', answers, answers_kept_s)
redis.call('EXPIRE', answer_order, answers_kept_s)
redis.call('EXPIRE', sticky, answers_kept_s)
redis.call('EXPIRE', counts, counts_kept_s)
return 1
