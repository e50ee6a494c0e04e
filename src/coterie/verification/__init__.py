"""Checking a finished run with code that shares nothing with the code that made it.

No module here imports another room of coterie: the certificate is read, posts are hashed and
epsilon is computed by other means than in training (a contract of the import linter holds it). An
error there is not repeated here but found.
"""
