"""Public tables of measurements as records."""
