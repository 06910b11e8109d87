"""Energy of epochs under power limits."""
