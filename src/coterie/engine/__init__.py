"""The engine runs a plan: `rounds` has the two halves of a round, `simulate` the in-process run."""
