"""Runs real jobs on a real device and writes the results, one measurement at a time."""
