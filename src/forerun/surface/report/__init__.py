"""Turns answers into pages, tables and plots; holds no model and computes no prediction."""
