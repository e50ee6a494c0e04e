"""Attacks on runs, each from a `View`: the observations of an adversary."""
