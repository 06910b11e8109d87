"""``forerun measure`` and its commands."""
