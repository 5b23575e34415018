"""Write jobs for schedulers, and submit them."""
