"""``procgroup top``: a live view of a running job, read from the flight records of its ranks."""
