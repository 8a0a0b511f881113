"""Plans of saves, loads, shared reads and exports: pure functions over values."""
