-- Returns a name's record, last version and notes, as one moment has them; nil for each that is missing.
-- KEYS: adapters, versions, version_notes
-- ARGV: field
return {
  redis.call('HGET', adapters, field), redis.call('HGET', versions, field), redis.call('HGET', version_notes, field),
}
