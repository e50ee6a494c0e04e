"""Engines run a plan: the round is written once, in `rounds`."""
