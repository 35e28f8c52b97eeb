-- Returns the next cursor and about `count` fields of a hash with their values, in turn, a line each: a client reads
-- one long string much faster than many short ones.
-- KEYS: hash
-- ARGV: cursor, count
local page = redis.call('HSCAN', hash, cursor, 'COUNT', count)
return {page[1], table.concat(page[2], '\n')}
