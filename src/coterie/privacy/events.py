"""What is released and who takes part: the words in which a plan is put to the accountant."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Relation = Literal["zero_out", "replace"]
"""What neighbours are: a client's contributions become zero, or become any others."""
Kind = Literal["everyone", "poisson", "fixed"]


@dataclass(frozen=True)
class Gaussian:
    """One Gaussian release of a sum to which each client contributes at most a bound.

    **Guarantee:** with all clients taking part, s/z-Gaussian DP for noise multiplier z = standard
    deviation / bound, with s = 1 for `zero_out` and s = 2 for `replace` (Dong, Roth and Su 2022);
    `tests/accounting/test_laws.py`.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (self.noise_multiplier > 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier}: expected a positive finite number; "
                "use NonPrivate() for a release without noise"
            )


@dataclass(frozen=True)
class NonPrivate:
    """A release without noise: epsilon is infinite.

    **Guarantee:** none.
    """


Event = Gaussian | NonPrivate


@dataclass(frozen=True)
class Participation:
    """Who takes part in each round, as far as accounting cares.

    Args:
        kind: "everyone"; "poisson" (each client by its own coin); "fixed" (a cohort of fixed size
            drawn without replacement). Cohorts are drawn afresh each round.
        rate: The probability that a given client takes part in a given round.
        visible: Whether the adversary sees who takes part. A visible cohort amplifies nothing.

    **Guarantee:** none by itself; it states an assumption that the sampler has to meet.
    """

    kind: Kind
    rate: float = 1.0
    visible: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind = {self.kind!r}: expected one of {', '.join(get_args(Kind))}")
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"rate = {self.rate}: expected a probability above 0 and at most 1; "
                "give expected cohort size / number of clients"
            )
        if self.kind == "everyone" and self.rate != 1:
            raise ValueError(
                f"rate = {self.rate} with kind = 'everyone': expected 1; "
                "use kind 'poisson' to sample clients"
            )


def default_delta(clients: int) -> float:
    """Choose delta well below 1/clients, at which publishing one client in clear would pass.

    **Guarantee:** none; a convention.

    >>> default_delta(205), default_delta(1_000_000)
    (1e-05, 1e-07)
    """
    if clients < 1:
        raise ValueError(f"clients = {clients}: expected at least 1")
    return min(1e-5, 1 / (10 * clients))


def check_relation(relation: Relation) -> None:
    """Refuse a relation that has no account."""
    if relation not in get_args(Relation):
        raise ValueError(
            f"relation = {relation!r}: expected one of {', '.join(get_args(Relation))}"
        )


def check_delta(delta: float) -> None:
    """Refuse a delta at which no epsilon is defined."""
    if not 0 < delta < 1:
        raise ValueError(
            f"delta = {delta}: expected a number strictly between 0 and 1; "
            "default_delta(clients) gives a sound one"
        )
