"""Profiles of a user's training script, which runs unchanged and is watched from inside and outside."""
