"""Pages and charts of profiles, tunings and scenarios."""
