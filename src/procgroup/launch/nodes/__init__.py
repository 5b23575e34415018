"""The agent of a node, and how the agents of all nodes agree."""
