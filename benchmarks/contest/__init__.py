"""The comparison with other libraries: the state, the contestants, the rounds and the figures."""
