"""The ranks of one node: their start, their environment, their place, their end."""
