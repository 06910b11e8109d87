"""Earlier systems: regressors, file formats, layer tables, parameter servers."""
