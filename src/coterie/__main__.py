"""Run the command line as `python -m coterie`."""

from coterie.cli.main import entry

entry()
