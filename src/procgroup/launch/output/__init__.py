"""What the ranks print and report: on the console and in files."""
