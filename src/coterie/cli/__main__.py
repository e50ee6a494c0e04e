"""Run the command line as `python -m coterie.cli`."""

from coterie.cli.main import entry

entry()
