"""Advantages and losses: pure functions, no I/O, no collectives; one file an algorithm (see registry)."""
