"""Where models come from: libraries, families, configuration files and the code of users."""
