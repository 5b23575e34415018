"""Jobs for schedulers: what to submit, and the submission."""
