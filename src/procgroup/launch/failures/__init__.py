"""The failures of ranks: evidence, causes, reports."""
