"""``python -m forerun`` is the command ``forerun``."""

from forerun.surface.cli.main import run

if __name__ == "__main__":
    run()
