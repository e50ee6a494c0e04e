"""What a check comes to: it holds, fails, or says why it could not be made."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from coterie.verification.accounting import Span

Makes = Callable[[], "Check | Iterator[Check]"]
Status = Literal["ok", "FAILED", "not recomputed", "not here"]
UNCHECKED = (
    "shared.npz is as certified, but nothing here ties its numbers to the posts: only replaying "
    "them with the method does",
    "that the noise was drawn as stated and the clip applied; that the folder was not made up "
    "whole: a certificate is not signed",
)
"""What no check of a folder can say."""


@dataclass(frozen=True)
class Check:
    """One check: its name, how it went, what was found and what was expected."""

    name: str
    status: Status
    found: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Verdict:
    """All checks of a folder; verified if each holds, private files that are not here apart."""

    folder: str
    checks: tuple[Check, ...]
    unchecked: tuple[str, ...] = UNCHECKED

    @property
    def verified(self) -> bool:
        """Whether nothing failed, and everything that is public was checked."""
        return all(check.status in ("ok", "not here") for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "run": self.folder,
            "verified": self.verified,
            "checks": [asdict(check) for check in self.checks],
            "not_checked": list(self.unchecked),
        }


def judge(name: str, faults: list[str], expected: str, found: str = "") -> Check:
    """Make a check of the faults that were found."""
    if not faults:
        return Check(name, "ok", found, expected)
    more = f"; {len(faults) - 3} more" if len(faults) > 3 else ""
    told = "; ".join(fault if len(fault) <= 300 else f"{fault[:300]}..." for fault in faults[:3])
    return Check(name, "FAILED", told + more, expected)


def guarded(name: str, make: Makes) -> Iterator[Check]:
    """Make checks of what may be anything: one that cannot be made has failed."""
    try:
        made = make()
        yield from [made] if isinstance(made, Check) else list(made)
    except Exception as error:  # whatever was forged, the answer is a verdict
        told = f"{type(error).__name__}: {str(error)[:200]}"
        yield Check(name, "FAILED", told, "something that can be checked")


def point(name: str, value: float | None) -> dict[str, Span]:
    """Return a number that has to be met, if there is one."""
    return {} if value is None else {name: Span(value, value)}


def compared(
    name: str, stated: Mapping[str, Any], recompute: Callable[[], Mapping[str, Span]]
) -> Iterator[Check]:
    """Compare stated numbers with those computed anew, a check each."""
    try:
        found = recompute()
    except (ValueError, ArithmeticError, KeyError) as error:
        yield Check(name, "not recomputed", str(error), "a number computed anew")
        return
    for key in sorted({*stated, *found}):
        label = key if key in ("epsilon", name) else f"{name}: {key}"
        if key not in stated or key not in found:
            yield Check(
                label, "FAILED", f"stated {stated.get(key)}", f"recomputed {found.get(key)}"
            )
            continue
        yield _near(label, stated[key], found[key])


def _near(label: str, stated: Any, span: Span) -> Check:
    number = math.inf if stated == "inf" else stated
    good = type(number) in (int, float) and span.holds(number)
    digits = 6 if good else 12  # both alike; where they differ, enough to see it
    low, high = (f"{end:.{digits}g}" for end in (span.low, span.high))
    expected = low if low == high else f"{low} to {high}"
    said = f"{number:.{digits}g}" if type(number) in (int, float) else str(stated)
    found = f"stated {said}, recomputed {expected}"
    return Check(label, "ok" if good else "FAILED", found, "the same, to rounding")
