"""Opening a checkpoint of any format, and reading values from it."""
