"""Predicted against measured: fits, cross-validated studies and the accuracy document."""
