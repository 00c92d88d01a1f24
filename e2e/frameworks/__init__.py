"""Training frameworks whose own code runs without GPUs, for the examples that claim to fit into it."""
