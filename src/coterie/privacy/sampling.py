"""Sampling of the clients of a round, and what the other clients know of it.

Poisson sampling with a hidden cohort is the default: every client takes part independently, so a
client's participation reveals nothing about another's, and amplification holds against any
coalition. Under fixed-size sampling all other clients together know the cohort from their own
participation: amplification holds only for an outsider.

This module never imports torch: planning must be fast.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.entropy import Entropy, uniforms
from coterie.privacy.events import Kind, Participation


class Sampler(ABC):
    """Draws cohorts, and describes them to the accountant."""

    kind: ClassVar[Kind]
    cohort: float | None
    visible: bool

    @abstractmethod
    def draw(self, clients: int, entropy: Entropy, number: int = 0) -> NDArray[np.int64]:
        """Draw the ids of a round's cohort, in ascending order; `number` counts rounds from 0."""

    def scheduled(self, clients: int, number: int) -> NDArray[np.int64] | None:
        """Return the cohort of a round under a public schedule; None if it is drawn."""
        return None

    def rate(self, clients: int) -> float:
        """Return the probability that a client takes part in a round."""
        if self.cohort is None:
            return 1.0
        if not 0 < self.cohort <= clients:
            raise ValueError(
                f"cohort = {self.cohort}: expected a number between 0 and the number of clients "
                f"({clients}); leave it out to let everyone take part"
            )
        return float(self.cohort) / clients

    def expected(self, clients: int) -> float:
        """Return the expected cohort size: the public denominator of every mean."""
        return self.rate(clients) * clients

    def largest(self, clients: int) -> int:
        """Return the largest possible cohort."""
        return clients

    def participation(self, clients: int) -> Participation:
        """Describe the cohort for the accountant."""
        return Participation(self.kind, self.rate(clients), self.visible)

    @classmethod
    def choices(cls) -> Mapping[str, type["Sampler"]]:
        """Return the samplers by name."""
        return {kind.kind: kind for kind in (Everyone, Poisson, FixedSize, Cyclic)}


@dataclass(frozen=True)
class Everyone(Sampler):
    """All clients take part in every round."""

    kind: ClassVar[Kind] = "everyone"
    cohort = None
    visible = False

    def draw(self, clients: int, entropy: Entropy, number: int = 0) -> NDArray[np.int64]:
        """Draw everyone."""
        return np.arange(clients, dtype=np.int64)


@dataclass(frozen=True)
class Poisson(Sampler):
    """Every client takes part independently with probability cohort / clients.

    `cohort` is the expected number of clients in a round, None for all of them; others observe who
    they are if it is `visible`.
    """

    kind: ClassVar[Kind] = "poisson"
    cohort: float | None = None
    visible: bool = False

    def draw(self, clients: int, entropy: Entropy, number: int = 0) -> NDArray[np.int64]:
        """Draw by geometric gaps: the time depends on the cohort, not on the number of clients.

        **Guarantee:** each client is in with probability `rate`, independently. Test:
        tests/statistics/test_sampling.py.
        """
        rate = self.rate(clients)
        if rate == 1.0:
            return np.arange(clients, dtype=np.int64)
        found: list[NDArray[np.int64]] = []
        position = -1
        batch = 16 + math.ceil(clients * rate + 6 * math.sqrt(clients * rate))
        while position < clients:
            gaps = np.floor(np.log(uniforms(entropy, batch)) / math.log1p(-rate)) + 1
            # One gap beyond the end is enough; capped so that the running sum stays an integer.
            steps = position + np.cumsum(np.minimum(gaps, clients + 1.0))
            found.append(steps[steps < clients].astype(np.int64))
            position = int(steps[-1])
        return np.concatenate(found)


@dataclass(frozen=True)
class FixedSize(Sampler):
    """A cohort of exactly `cohort` clients, drawn without replacement; relation `replace` only."""

    kind: ClassVar[Kind] = "fixed"
    cohort: int
    visible: bool = False

    def draw(self, clients: int, entropy: Entropy, number: int = 0) -> NDArray[np.int64]:
        """Draw a uniform subset by Floyd's algorithm.

        **Guarantee:** every subset of the given size is equally likely. Test:
        tests/statistics/test_sampling.py.
        """
        self.rate(clients)  # raises for an invalid cohort
        chosen: set[int] = set()
        words = entropy.words(self.cohort).tolist()
        for word, last in zip(words, range(clients - self.cohort, clients), strict=True):
            pick = _below(last + 1, word, entropy)
            chosen.add(last if pick in chosen else pick)
        return np.array(sorted(chosen), dtype=np.int64)

    def expected(self, clients: int) -> float:
        """Return the cohort size."""
        return float(self.cohort)

    def largest(self, clients: int) -> int:
        """Return the cohort size."""
        return self.cohort


@dataclass(frozen=True)
class Cyclic(Sampler):
    """Each client once in b = ceil(clients / cohort) rounds, by a public schedule.

    Client i takes part in the rounds t with t = i modulo b. Sites enforce it: a coordinator cannot
    ask a client in another round. Nothing is hidden, so nothing is amplified; but a client is known
    to take part in at most ceil(T / b) of T rounds, and noise may be correlated in between (see
    `coterie.privacy.banded`). `cohort` is the largest number of clients in a round.
    """

    kind: ClassVar[Kind] = "cyclic"
    visible = True
    cohort: int

    def period(self, clients: int) -> int:
        """Return b."""
        if type(self.cohort) is not int or not 0 < self.cohort <= clients:
            raise ValueError(
                f"cohort = {self.cohort}: expected a whole number from 1 to the number of clients "
                f"({clients})"
            )
        return -(-clients // self.cohort)

    def rate(self, clients: int) -> float:
        """Return 1 / b."""
        return 1 / self.period(clients)

    def scheduled(self, clients: int, number: int) -> NDArray[np.int64]:
        """Return the clients whose turn it is."""
        period = self.period(clients)
        return np.arange(number % period, clients, period, dtype=np.int64)

    def draw(self, clients: int, entropy: Entropy, number: int = 0) -> NDArray[np.int64]:
        """Return the clients whose turn it is; nothing is drawn.

        **Guarantee:** in any b rounds that follow each other each client is in exactly one. Test:
        tests/privacy/test_sampling.py.
        """
        return self.scheduled(clients, number)

    def largest(self, clients: int) -> int:
        """Return the size of the largest cohort."""
        return -(-clients // self.period(clients))


def _below(limit: int, word: int, entropy: Entropy) -> int:
    # Rejection keeps the draw unbiased.
    ceiling = (1 << 64) - (1 << 64) % limit
    while word >= ceiling:
        word = int(entropy.words(1)[0])
    return word % limit
