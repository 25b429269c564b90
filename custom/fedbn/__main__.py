"""The console command ``fedbn``."""

from fedbn.cli import machine, models, runs, studies  # noqa: F401 - each adds its commands
from fedbn.cli.common import app

if __name__ == "__main__":
    app()
