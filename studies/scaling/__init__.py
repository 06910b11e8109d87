"""Compares several devices with one."""
