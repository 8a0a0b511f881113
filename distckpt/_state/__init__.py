"""State dicts as tables of shards, and common state."""
