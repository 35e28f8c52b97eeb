-- Replaces the settings that were noted last (empty: none), and returns 1; or 0, as they are others by now.
-- include: ../audit.lua
-- KEYS: settings
-- ARGV: old_settings, new_settings, entry
if (redis.call('GET', settings) or '') ~= old_settings then return 0 end
redis.call('SET', settings, new_settings)
append_audit('', entry, '')
return 1
