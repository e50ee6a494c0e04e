"""The command line: one module a command; `coterie.cli.main` is the entry point."""
