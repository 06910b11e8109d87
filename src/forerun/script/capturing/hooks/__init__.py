"""Hooks that run inside the captured script's process."""
