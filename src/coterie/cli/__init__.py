"""The command line: one module a command; `coterie.cli.main` is the entry point."""


def entry() -> None:
    """Run the command line."""
    from coterie.cli.main import entry

    entry()
