"""``procgroup completion``: completions of the command line for bash, zsh and fish."""
