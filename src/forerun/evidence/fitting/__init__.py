"""Fits to measured steps and layers: regressors, calibration of a device, splits, errors and intervals."""
