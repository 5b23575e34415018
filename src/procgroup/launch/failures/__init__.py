"""Why ranks failed: evidence, causes, reports."""
