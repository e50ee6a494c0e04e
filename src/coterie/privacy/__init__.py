"""Releases and their accounts: mechanisms, billboard and ledger; events, profiles and guarantees.

This module imports neither torch nor numpy, so that the command line can list the kinds of noise.
"""

from coterie.core.environment import entry_points

NOISES = (
    "gaussian",
    "shares",
    "banded",
    "laplace",
    "wishart",
    "wishart_paper",
    "local",
    "local_paper",
)
"""The kinds of noise of this package: see `coterie.privacy.noise`."""


def noise_names() -> tuple[str, ...]:
    """Return the names of all kinds of noise, those of other packages included.

    Mechanisms that a program registers itself are in `Noise.choices()` only.
    """
    other = {point.name for point in entry_points(group="coterie.mechanisms")}
    return (*NOISES, *sorted(other - set(NOISES)))
