"""How a checkpoint becomes visible: a rename, or a conditional put on an object store."""
