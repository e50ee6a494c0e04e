"""Attacks on what a run lets others see: each takes a `View`, the threat model as a value."""
