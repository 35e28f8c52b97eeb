"""What quotas keep in Redis, and the Lua scripts that read and change it. `gcra.py` says what a bucket is.

All keys of a tenant have its hash tag, so that they are in one slot of a Redis cluster. Times are those of Redis, in
microseconds: routers whose clocks differ share a bucket all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from .gcra import PERIOD_US, SLACK_US

# So often an answer is taken up again for what it has cost already: connections break, and routers die. From then on it
# is a new one for the quotas, since who comes back to an answer that no gang keeps has it computed again.
FREE_RETURNS: Final = 4


class Outcome(IntEnum):
    RATE_EXCEEDED = 0
    ADMITTED = 1
    TOO_MANY_STREAMS = 2


@dataclass(frozen=True, slots=True)
class QuotaKeys:
    """The Redis keys of one tenant, by its life."""

    life: str

    @property
    def prefix(self) -> str:
        return f"motet:{{tenant:{self.life}}}:quota:"

    @property
    def rates(self) -> str:
        """Hash: name of a rate -> "backlog at"."""
        return self.prefix + "rates"

    def streams(self, key_id: str = "") -> str:
        """Sorted set: lease -> when it ends. Of the tenant, or of one of its keys."""
        return self.prefix + (f"streams:{key_id}" if key_id else "streams")

    def answer(self, response_id: str) -> str:
        """What one answer holds: its lease, the most tokens that anybody said it has used, how often it was taken up
        again, then for each rate its name, what was charged for it, what one unit takes, and the end of the backlog
        with it.
        """
        return self.prefix + f"answer:{response_id}"

    def done(self, name: str) -> str:
        """There is one: what is called so, a lease or a report, was done, or must not be done any more."""
        return self.prefix + f"done:{name}"


_BUCKETS = f"""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function bucket(value)
  if not value then return 0 end
  local backlog, at = string.match(value, '(%S+) (%S+)')
  return math.max(0, backlog - math.max(0, now - at))
end
local function write(name, backlog)
  redis.call('HSET', KEYS[1], name, string.format('%.6f %.0f', backlog, now))
  local left = math.ceil((backlog + {PERIOD_US:.0f}) / 1000)
  if redis.call('PTTL', KEYS[1]) < left then redis.call('PEXPIRE', KEYS[1], left) end
end
"""
# KEYS: rates, streams of the tenant, streams of the key, the answer, whether the lease must not be opened.
# ARGV: lease (empty: nothing is taken, only looked at), its life, most streams of the tenant, and of the key (empty: no
# bound), 1: the client has had a part of the answer, milliseconds for which the answer is kept (0: it is not); then for
# each rate its name, limit, cost, 1: what is not used is given back.
# Returns an `Outcome`, now, streams of the tenant, streams of the key, then the backlog of each rate as text. All that
# is asked for is taken, or nothing.
OPEN_SCRIPT = f"""{_BUCKETS}
local lease, life = ARGV[1], tonumber(ARGV[2])
if lease ~= '' and redis.call('EXISTS', KEYS[5]) == 1 then return {{0, now, 0, 0}} end
local held = redis.call('GET', KEYS[4])
local had, most, returns, charges = string.match(held or ' 0 -1', '^(%S*) (%S+) (%S+)(.*)$')
returns = returns + 1
if returns > {FREE_RETURNS} then held, had = false, '' end
local outcome = 1
local counts, let_go = {{0, 0}}, {{0, 0}}
for i = 1, 2 do
  if ARGV[2 + i] ~= '' then
    redis.call('ZREMRANGEBYSCORE', KEYS[1 + i], '-inf', now)
    if had ~= '' and lease ~= '' then let_go[i] = redis.call('ZREM', KEYS[1 + i], had) end
    counts[i] = redis.call('ZCARD', KEYS[1 + i])
    if lease ~= '' and counts[i] >= tonumber(ARGV[2 + i]) then outcome = 2 end
  end
end
local names = {{}}
for i = 7, #ARGV, 4 do names[#names + 1] = ARGV[i] end
local values = #names > 0 and redis.call('HMGET', KEYS[1], unpack(names)) or {{}}
local backlogs, taken = {{}}, {{}}
for n = 1, #names do
  local i = 7 + 4 * (n - 1)
  local limit, cost = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  backlogs[n] = bucket(values[n])
  if ARGV[5] == '1' and returns <= {FREE_RETURNS} and (held or ARGV[i + 3] == '0') then cost = 0 end
  taken[n] = math.min(cost, limit)
  if lease ~= '' and cost > 0 then
    local full = backlogs[n] + taken[n] * ({PERIOD_US:.0f} / math.max(limit, 1))
    if limit <= 0 or full > {PERIOD_US + SLACK_US:.0f} then outcome = 0 end
  end
end
if outcome == 1 and lease ~= '' then
  local answer = lease .. ' 0 0'
  for n = 1, #names do
    local i = 7 + 4 * (n - 1)
    local step = {PERIOD_US:.0f} / math.max(tonumber(ARGV[i + 1]), 1)
    if taken[n] > 0 then
      backlogs[n] = backlogs[n] + taken[n] * step
      write(names[n], backlogs[n])
    end
    if taken[n] > 0 or ARGV[i + 3] == '1' then
      answer = answer .. string.format(' %s %.0f %.17g %.0f', names[n], taken[n], step, now + backlogs[n])
    end
  end
  for i = 1, 2 do
    if ARGV[2 + i] ~= '' then
      redis.call('ZADD', KEYS[1 + i], now + life, lease)
      redis.call('PEXPIRE', KEYS[1 + i], math.ceil(life / 500))
      counts[i] = counts[i] + 1
    end
  end
  if returns > 0 then answer = string.format('%s %s %.0f%s', lease, most, returns, charges) end
  if ARGV[6] ~= '0' then redis.call('SET', KEYS[4], answer, 'PX', ARGV[6]) end
elseif lease ~= '' then
  for i = 1, 2 do
    if let_go[i] == 1 then redis.call('ZADD', KEYS[1 + i], now + life, had) end
  end
end
local reply = {{outcome, now, counts[1], counts[2]}}
for n = 1, #names do reply[4 + n] = string.format('%.6f', backlogs[n]) end
return reply
"""
# KEYS: as above, but the last. ARGV: lease, tokens that the answer has used by now, 1: it has ended, milliseconds for
# which it is kept then, for a client that comes back for the rest (0: it is forgotten). Charges what was used beyond
# what was charged, and at the end gives back what was charged and not used. An answer that was taken up again has used
# what any of its leases says, so that who comes back and leaves at once gets nothing back. If it has gone over to
# another lease meanwhile, nothing is given back, and this returns 0, else now. Requests that were made stay made.
USE_SCRIPT = f"""{_BUCKETS}
local used = tonumber(ARGV[2])
if ARGV[3] == '1' then
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
end
local held = redis.call('GET', KEYS[4])
if not held then return 0 end
local lease, most, returns, rates = string.match(held, '^(%S+) (%S+) (%S+)(.*)$')
local is_its = lease == ARGV[1]
used = math.max(used, tonumber(most))
local answer = string.format('%s %.0f %s', lease, used, returns)
for name, charged, step, finish in string.gmatch(rates, '(%S+) (%S+) (%S+) (%S+)') do
  charged, step, finish = tonumber(charged), tonumber(step), tonumber(finish)
  local backlog = bucket(redis.call('HGET', KEYS[1], name))
  local is_of_tokens = string.find(name, '^tokens')
  if is_of_tokens and used > charged then
    backlog = backlog + (used - charged) * step
    write(name, backlog)
    charged, finish = used, now + backlog
  elseif is_of_tokens and ARGV[3] == '1' and is_its and used < charged then
    write(name, math.max(0, backlog - math.min((charged - used) * step, math.max(0, finish - now))))
    charged = used
  end
  answer = answer .. string.format(' %s %.0f %.17g %.0f', name, charged, step, finish)
end
if ARGV[3] ~= '1' or not is_its then
  redis.call('SET', KEYS[4], answer, 'KEEPTTL')
elseif ARGV[4] == '0' then
  redis.call('DEL', KEYS[4])
else
  redis.call('SET', KEYS[4], answer, 'PX', ARGV[4])
end
return is_its and now or 0
"""
# KEYS: as above. ARGV: lease, its life, 1: streams of the tenant are bounded, 1: those of the key are, milliseconds for
# which the answer is kept. A router let the answer through under this lease while it could not ask: what the answer
# holds goes over to it, places too, so that it has none twice, and who takes it up again after that is known.
HOLD_SCRIPT = """
local time = redis.call('TIME')
local now, life = time[1] * 1000000 + time[2], tonumber(ARGV[2])
local held = redis.call('GET', KEYS[4])
local had, most, returns, charges = string.match(held or ' 0 -1', '^(%S*) (%S+) (%S+)(.*)$')
if had == ARGV[1] then return now end
for i = 1, 2 do
  if ARGV[2 + i] == '1' then
    if had ~= '' then redis.call('ZREM', KEYS[1 + i], had) end
    redis.call('ZADD', KEYS[1 + i], now + life, ARGV[1])
    redis.call('PEXPIRE', KEYS[1 + i], math.ceil(life / 500))
  end
end
redis.call('SET', KEYS[4], string.format('%s %s %.0f%s', ARGV[1], most, returns + 1, charges), 'PX', ARGV[5])
return now
"""
# KEYS: a sorted set of streams. ARGV: life of a lease, then leases whose streams go on.
RENEW_SCRIPT = """
local time = redis.call('TIME')
local finish = time[1] * 1000000 + time[2] + ARGV[1]
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], finish, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[1] / 500))
return redis.call('ZCARD', KEYS[1])
"""
# KEYS: as of OPEN_SCRIPT. ARGV: lease, milliseconds for which it must not be opened any more, 1: it was for an answer
# of which the client has had a part. Gives back all that was taken under the lease, if it was opened: nobody has heard
# of it, and the answer was let through otherwise. What was charged before, for the answer's first part, stays charged.
VOID_SCRIPT = f"""{_BUCKETS}
redis.call('SET', KEYS[5], 1, 'PX', ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
local held = redis.call('GET', KEYS[4])
if not held or ARGV[3] == '1' then return 0 end
local lease, rates = string.match(held, '^(%S+) %S+ %S+(.*)$')
if lease ~= ARGV[1] then return 0 end
for name, charged, step, finish in string.gmatch(rates, '(%S+) (%S+) (%S+) (%S+)') do
  local backlog = bucket(redis.call('HGET', KEYS[1], name))
  write(name, math.max(0, backlog - math.min(charged * step, math.max(0, finish - now))))
end
redis.call('DEL', KEYS[4])
return now
"""
# KEYS: rates, whether it was reported. ARGV: a rate's name, its limit, units that a router has let through while it
# could not ask, milliseconds for which to say it again changes nothing. No ARGV: nothing is reported.
REPORT_SCRIPT = f"""{_BUCKETS}
if #ARGV > 0 and redis.call('SET', KEYS[2], 1, 'NX', 'PX', ARGV[4]) then
  write(ARGV[1], bucket(redis.call('HGET', KEYS[1], ARGV[1])) + ARGV[3] * {PERIOD_US:.0f} / ARGV[2])
end
return 1
"""
