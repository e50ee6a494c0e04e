"""A run: from a plan to scores, and the folder that keeps it."""
