"""The ranks' output and reports: on the console and in files."""
