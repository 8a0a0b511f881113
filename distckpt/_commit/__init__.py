"""Make a checkpoint visible in one step: a rename, or a conditional put on an object store."""
