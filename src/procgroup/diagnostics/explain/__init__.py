"""``procgroup explain``: what the ranks of a job do, or did, by their flight records."""
