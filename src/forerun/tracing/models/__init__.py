"""Sources of models: libraries, families, configuration files and the code of users."""
