"""Communication between ranks: collectives, lost ranks, timing."""
