"""Measurements that other programs wrote, read into records."""
