"""Out-of-memory verdicts against runs whose limit is known."""
