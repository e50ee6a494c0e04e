"""Check a finished run with code that shares nothing with the code that made it.

No module here imports another package of coterie: the certificate is read, releases are hashed and
epsilon is recomputed by other means than in training (a contract of the import linter). An error
there is not repeated here but found.
"""

from coterie.verification.certificate import UnreadableError
from coterie.verification.folder import Check, Verdict, verify, verify_selection

__all__ = ["Check", "UnreadableError", "Verdict", "verify", "verify_selection"]
