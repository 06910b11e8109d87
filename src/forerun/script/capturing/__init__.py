"""Capture: the training step of a script that nobody edited, recorded in a process of its own."""
