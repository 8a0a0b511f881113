"""Moving bytes: reading, writing, staging, sharing reads, exporting."""
