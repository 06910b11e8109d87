"""The calls a user makes, one module per verb; ``forerun`` offers them by name."""
