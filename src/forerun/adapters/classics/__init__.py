"""Parameter servers, and the regressors and file formats of the earlier systems."""
