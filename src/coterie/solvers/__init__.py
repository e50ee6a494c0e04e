"""Solvers of local problems, over stacks of clients, and of the central baselines."""
