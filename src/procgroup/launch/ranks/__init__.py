"""The ranks of one node: their start, environment, placement and end."""
