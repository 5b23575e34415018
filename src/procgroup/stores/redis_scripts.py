"""The operations of a RedisStore as Lua scripts: Redis runs one script at a time, so each operation is atomic.

A job has four hashes: values by key; queues by key, as the number of the first item and the next free number; items by
number and key; barriers by name. Every change renews the expiry of the four hashes. A change that can end a wait
publishes an empty message in the channel of its key or barrier, which wakes the waiting threads.
"""

from __future__ import annotations

KEYS = ("values", "queues", "items", "barriers")
KEY_CHANNEL, BARRIER_CHANNEL = "key:", "barrier:"

_BEGINNING = """
local values, queues, items, barriers = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local milliseconds, channels, key = ARGV[1], ARGV[2], ARGV[3]
local function keep()
  for _, hash in ipairs(KEYS) do redis.call('PEXPIRE', hash, milliseconds) end
end
local function wake(kind, name) redis.call('PUBLISH', channels .. kind .. name, '') end
local function range(name)
  local first, after = string.match(redis.call('HGET', queues, name) or '0 0', '(%d+) (%d+)')
  return tonumber(first), tonumber(after)
end
"""

_BODIES = {
    "write": """
for i = 3, #ARGV, 2 do
  redis.call('HSET', values, ARGV[i], ARGV[i + 1])
  wake('key:', ARGV[i])
end
keep()
""",
    "exist": """
local found = {}
for i = 3, #ARGV do
  found[i - 2] = redis.call('HEXISTS', values, ARGV[i]) + redis.call('HEXISTS', queues, ARGV[i])
end
return found
""",
    "list": """
return {redis.call('HKEYS', values), redis.call('HKEYS', queues)}
""",
    # HINCRBY counts with 64 bits, which numbers of Lua cannot, but takes no leading zeros.
    "add": """
local text = redis.call('HGET', values, key) or '0'
local sign, digits = string.match(text, '^(-?)0*(%d+)$')
if not digits then return {'not a number'} end
redis.call('HSET', values, key, (digits == '0' and '' or sign) .. digits)
local sum = redis.pcall('HINCRBY', values, key, ARGV[4])
if type(sum) == 'table' then
  redis.call('HSET', values, key, text)
  return {string.find(sum.err, 'overflow') and 'too large' or 'not a number'}
end
keep()
wake('key:', key)
return {'sum', redis.call('HGET', values, key)}
""",
    "compare_set": """
local value = redis.call('HGET', values, key)
if (value or '') ~= ARGV[4] then return value end
redis.call('HSET', values, key, ARGV[5])
keep()
wake('key:', key)
return ARGV[5]
""",
    "append": """
local value = redis.call('HGET', values, key) or ''
if #value + #ARGV[4] > tonumber(ARGV[5]) then return #value + #ARGV[4] end
redis.call('HSET', values, key, value .. ARGV[4])
keep()
wake('key:', key)
return 0
""",
    "delete": """
local first, after = range(key)
for number = first, after - 1 do redis.call('HDEL', items, number .. ':' .. key) end
local deleted = redis.call('HDEL', queues, key) + redis.call('HDEL', values, key)
keep()
return deleted
""",
    "push": """
local first, after = range(key)
redis.call('HSET', items, after .. ':' .. key, ARGV[4])
redis.call('HSET', queues, key, first .. ' ' .. (after + 1))
keep()
wake('key:', key)
""",
    "pop": """
local first, after = range(key)
if first == after then return false end
local name = first .. ':' .. key
local value = redis.call('HGET', items, name)
redis.call('HDEL', items, name)
if first + 1 == after then
  redis.call('HDEL', queues, key)
else
  redis.call('HSET', queues, key, (first + 1) .. ' ' .. after)
end
keep()
return value
""",
    "length": """
local first, after = range(key)
return after - first
""",
    "enter_barrier": """
local caller, world_size = ARGV[4], tonumber(ARGV[5])
local cell = redis.call('HGET', barriers, key)
local barrier = cell and cjson.decode(cell) or {round = caller, world_size = world_size, callers = {}}
if barrier.world_size ~= world_size then return {'other size', tostring(barrier.world_size)} end
table.insert(barrier.callers, caller)
if #barrier.callers < world_size then
  redis.call('HSET', barriers, key, cjson.encode(barrier))
  keep()
  return {'waits', barrier.round}
end
redis.call('HDEL', barriers, key)
wake('barrier:', key)
return {'opens'}
""",
    "leave_barrier": """
local cell = redis.call('HGET', barriers, key)
local barrier = cell and cjson.decode(cell)
if not barrier or barrier.round ~= ARGV[4] then return 0 end
local others = {}
for _, caller in ipairs(barrier.callers) do
  if caller ~= ARGV[5] then table.insert(others, caller) end
end
if #others > 0 then
  barrier.callers = others
  redis.call('HSET', barriers, key, cjson.encode(barrier))
else
  redis.call('HDEL', barriers, key)
end
return 1
""",
}

SCRIPTS = {name: _BEGINNING + body for name, body in _BODIES.items()}
"""The scripts by name. Arguments: milliseconds to live, prefix of the channels, then the operation's own."""
