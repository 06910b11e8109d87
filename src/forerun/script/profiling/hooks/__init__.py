"""Hooks that run inside the user's process: they use the standard library and the user's framework alone."""
