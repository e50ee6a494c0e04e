"""What the command line does, a module a command; see `coterie.cli`."""
