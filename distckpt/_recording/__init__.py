"""Recording the places where an engine's weight loader puts stored elements."""
