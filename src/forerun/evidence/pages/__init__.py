"""Pages and charts of measurements, calibrations, fits and evaluations."""
