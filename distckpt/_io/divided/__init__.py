"""Planning of a save with very many shards, by several ranks."""
