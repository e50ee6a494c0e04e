"""Secure aggregation: sums of which nobody sees the parts."""
