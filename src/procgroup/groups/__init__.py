"""Process groups, and what they ask of a backend."""
