"""The page of ``procgroup explain --html``: one file that needs nothing else."""
