"""What a coordinator works with: who carries its letters, what it is given, what it remembers."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.engines.federation import Federation
from coterie.plan.plan import Plan
from coterie.wire import Parcel

Answer = Parcel | str
"""What came back for a question: a parcel, or why there is none."""


class ShortRoundError(RuntimeError):
    """Raised when too few clients answered a round; the run can be resumed."""


class Transport(Protocol):
    """Carries parcels to sites and back."""

    def meet(
        self,
        greet: Callable[[], Parcel],
        recognise: Callable[[Parcel], str],
        sites: int,
        seconds: float,
    ) -> set[str]:
        """Greet whoever is there until so many sites are recognised or time is up; give them."""

    def ask(self, questions: Mapping[str, Parcel], seconds: float) -> Iterator[tuple[str, Answer]]:
        """Send questions; give answers as they come, until all did or time is up."""


Note = Callable[..., None]
"""Takes an event and facts: the log of the run, which is private."""


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """What a coordinator is given.

    Attributes:
        plan: Resolved.
        federation: Its public facts.
        agreement: Names plan and federation: both sides must have the same.
        folder: The run folder.
        key: The coordinator's signing key.
        transport: Carries letters.
        note: Takes events for the log.
    """

    plan: Plan
    federation: Federation
    agreement: str
    folder: Path
    key: Ed25519PrivateKey
    transport: Transport
    note: Note


@dataclass
class Tally:
    """What became of the questions of a round: of the clients drawn, and of sites.

    Attributes:
        asked: Clients that were drawn.
        answered: Those of them whose sites answered.
        refused: Answers that are none, in the last attempt.
        failed: Sites that said that they could not, in the last attempt.
        silent: Sites that said nothing in time, in the last attempt.
        scaled: Sums that were too long.
        zeroed: Sums that were not finite.
        void: 1 if masked sums came and could not be opened.
    """

    asked: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    silent: int = 0
    scaled: int = 0
    zeroed: int = 0
    void: int = 0

    def ask_again(self) -> None:
        """Forget what became of sites in an attempt before; what was cut stays in the sum."""
        self.refused = self.failed = self.silent = 0

    def told(self) -> dict[str, int]:
        """Return the counts for the log; zeros are left out but for who was asked and answered."""
        found = dict(vars(self))
        always = ("asked", "answered")
        return {name: count for name, count in found.items() if count or name in always}


@dataclass
class Kept:
    """What the coordinator remembers between rounds, beside ledger and posts; private.

    Attributes:
        run: Names the run to its sites.
        round: The round that is under way, -1 before the first.
        cohort: Who was drawn for it.
        pending: The sites whose answers are in the post that is being made.
        counted: The last round in which each site's answer was in the post.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    round: int = -1
    cohort: list[int] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
