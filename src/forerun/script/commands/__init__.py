"""Commands on a script: capture, profile, tune, compare, apply."""
