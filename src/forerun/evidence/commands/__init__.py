"""Commands of the evidence: measure, records, calibrate, fit, evaluate."""
