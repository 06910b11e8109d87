"""Forecasts of learning curves, compared with the finished runs."""
