"""Compares policies on public workloads."""
