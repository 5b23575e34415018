"""Start processes from a program: ``spawn`` and ``start_processes``."""
