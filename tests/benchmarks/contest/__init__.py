"""The comparison with other libraries: the state, the contestants, the rounds, the figures and their picture."""
