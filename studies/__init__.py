"""Studies on public measurements, and the fits of what forerun ships: run them as ``python -m studies``."""
