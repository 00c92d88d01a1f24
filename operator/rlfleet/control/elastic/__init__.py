"""Putting engines to sleep and waking them, between rounds and under the slot (DESIGN sections 5 and 7)."""
