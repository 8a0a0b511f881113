"""The base of all other folders: errors, messages, dtypes, memory, threads, devices."""
