-- Returns the replies to read commands, as of one moment. A command whose last word is a number {n} is called for each
-- word of the reply to the n-th command, and its reply is the list of these replies.
-- KEYS: slot
-- ARGV: commands
local replies = {}
for place, command in ipairs(cmsgpack.unpack(commands)) do
  local last = command[#command]
  if type(last) == 'table' then
    replies[place] = {}
    for i, word in ipairs(replies[last[1]]) do
      command[#command] = word
      replies[place][i] = redis.call(unpack(command))
    end
  else
    replies[place] = redis.call(unpack(command))
  end
end
return replies
