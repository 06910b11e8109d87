"""Runs real jobs on a real device and writes what came out, one measurement at a time."""
