"""The base of all other folders: errors, messages, options, dtypes, memory, threads, trees."""
