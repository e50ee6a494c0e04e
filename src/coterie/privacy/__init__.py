"""Mechanisms, sampling, the billboard and the account: nothing else releases anything."""
