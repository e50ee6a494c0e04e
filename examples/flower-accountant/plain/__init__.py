"""A Flower app that keeps its own strategy."""
