"""Plans of saves, loads and exports: pure functions over values."""
