"""Local solvers: what one client does with its own rows, written over a stack of clients."""
