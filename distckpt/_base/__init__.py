"""What every other folder builds on: errors, messages, dtypes, memory, threads, devices."""
