"""Processes that a program starts itself: spawn and start_processes."""
