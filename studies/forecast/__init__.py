"""Forecasts of learning curves against what came."""
