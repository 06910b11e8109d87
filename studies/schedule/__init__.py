"""Policies beside each other on public workloads."""
