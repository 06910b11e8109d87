"""Forecasts of learning curves: curves, forecasters, intervals, laws of the batch size. Numbers only, no framework."""
