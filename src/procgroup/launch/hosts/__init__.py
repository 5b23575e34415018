"""The agents of several hosts, started over ssh by one command."""
