"""Steps, retention and preemption; `distckpt.manager` is the public path."""
