-- Removes trials from those that have new counts, each unless something was counted in it since its number was read.
-- KEYS: updated_trials
-- ARGV: trials_and_numbers[]
for i = 1, #trials_and_numbers, 2 do
  local trial, number = trials_and_numbers[i], trials_and_numbers[i + 1]
  if redis.call('HGET', updated_trials, trial) == number then redis.call('HDEL', updated_trials, trial) end
end
