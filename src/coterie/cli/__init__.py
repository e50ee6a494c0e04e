"""The command line: one module per command; `coterie.cli.main` is the entry point."""
