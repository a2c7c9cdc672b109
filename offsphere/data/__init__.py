"""Pictures, shards and the embedded set: what the lanes read."""
