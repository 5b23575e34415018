"""What the flight records of a job say: its ranks and calls as values, what is wrong, who waits for whom, as text."""
