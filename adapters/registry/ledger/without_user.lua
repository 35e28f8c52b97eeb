-- Groups as text: "user\tkey\tadapter\tversion\tdigest", or the same without "user\t" where the key has no user.
local OTHER_USERS = '(other)\t(other)\t'
local THEIR_ADAPTERS = '~(other)\t0\t'  -- has the price of any private adapter

local function is_of_one_user(group)
  if string.sub(group, 1, #OTHER_USERS) == OTHER_USERS then return false end
  return string.find(group, '^[^\t]*\t[^\t]*\t[^\t]*\t[^\t]*\t') ~= nil
end

-- The group of all other users of the same adapter, or of their private ones.
local function without_user(group)
  local adapter = string.match(group, '^[^\t]*\t[^\t]*\t(.*)$')
  return OTHER_USERS .. (string.sub(adapter, 1, 1) == '~' and THEIR_ADAPTERS or adapter)
end
