"""Parts of messages: suggestions for names that are misspelt, and counts."""

import difflib
from collections.abc import Iterable, Sequence


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the word that was probably meant; None if none is close.

    >>> closest("comapre", ["compare", "plan"]), closest("xyz", ["plan"])
    ('compare', None)
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Sequence[str], among: str = "one of ") -> str:
    """Return what was probably meant, or what is expected, as text."""
    near = closest(word, known)
    return f"did you mean {near}?" if near else f"expected {among}{', '.join(known)}"


def hint(word: str, known: Iterable[str]) -> str:
    """Return the name that was probably meant, to put after a wrong one; nothing if none is near.

    >>> f"no column 'scor'{hint('scor', ['age', 'score'])}; the columns are age, score"
    "no column 'scor' (did you mean 'score'?); the columns are age, score"
    """
    near = closest(word, known)
    return f" (did you mean {near!r}?)" if near else ""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "row"), counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 30) -> str:
    """Return names with commas; of many the first, and how many there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c"], most=2)
    ('a, b', 'a, b, ... (3 in all)')
    """
    more = f", ... ({len(names):,} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + more
