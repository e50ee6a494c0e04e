"""Who sees what: epsilon by view, where the server adds the noise and where clients do.

**Central noise.** The server sees each contribution before noise; under secure aggregation it would
still see the exact sum, to which it adds the noise itself. So nothing holds against it.

**Local noise** (deviation z C on each message; s = 1 under zero_out, 2 under replace):

- server: sees the client's noisy message whenever it takes part, and that it does. Given how often
  that is, n times, all messages together are s sqrt(n)/z-GDP, and n is binomial and tells nothing
  about data: the profile of a visible cohort.
- other clients, all together: subtract their own messages from the posted sum, and are left with
  the client's message, or with nothing. The same number.
- server under secure aggregation: sees the sum over the cohort, and who is in it. Of the noise in
  it, that of `honest` clients (the client's own included) is known to nobody: the rest, and the
  other contributions, are constants to whoever knows most. So s sqrt(n)/(z sqrt(honest))-GDP.
- outsider: sees the posts alone, a function of what the server sees under secure aggregation: at
  most its number. (Amplification by hidden sampling is not claimed: a client that stays away takes
  its noise with it, so sums with and without it differ in variance.)
"""

import math
from typing import TYPE_CHECKING

from coterie.privacy.composed import count, profile_of
from coterie.privacy.events import Event, Gaussian, LocalGaussian, Participation
from coterie.privacy.profiles import GaussianProfile, Profile

if TYPE_CHECKING:
    from coterie.privacy.accounting import Guarantee

_CENTRAL = {
    "server": "the server sees each bounded contribution before noise",
    "server_secure_aggregation": "the server adds the noise itself and sees the exact sum",
}


def smallest_cohort(participation: Participation, clients: int) -> int:
    """Return the fewest clients of a round in which a given client takes part."""
    if participation.rate == 1:
        return clients
    # A shade above, for rates such as 3/7 that are whole numbers of clients but for rounding.
    whole = math.floor(participation.rate * clients * (1 + 1e-12) + 1e-9)
    return max(1, whole) if participation.kind == "fixed" else 1


def check_honest(honest: int, participation: Participation, clients: int) -> None:
    """Refuse more honest clients than every round is sure to have."""
    fewest = smallest_cohort(participation, clients)
    if honest > fewest:
        raise ValueError(
            f"honest = {honest}: a round of {participation.kind} sampling may have only {fewest} "
            f"of {clients} clients, so no more can be trusted to add their noise in every round; "
            f"give at most {fewest}, or draw cohorts of a fixed size"
        )


def is_local(guarantee: "Guarantee") -> bool:
    """Return whether clients add noise themselves, in some round."""
    return any(isinstance(event, LocalGaussian) for event in guarantee.events)


def is_central(guarantee: "Guarantee") -> bool:
    """Return whether the server sees something without noise, in some round."""
    return any(not isinstance(event, LocalGaussian) for event in guarantee.events)


def summed_profile(guarantee: "Guarantee") -> Profile:
    """Account for what is seen of local noise by whoever sees sums alone, and every cohort.

    **Guarantee:** an upper bound on delta(epsilon) for a server under secure aggregation (which it
    follows), and for outsiders, if the declared number of honest clients add their noise; see the
    module. `tests/accounting/test_local.py`.
    """
    events: list[Event] = [
        Gaussian(event.noise_multiplier * math.sqrt(event.honest))
        if isinstance(event, LocalGaussian)
        else event
        for event in guarantee.events
    ]
    return profile_of(count(events), guarantee.participation.shown, guarantee.relation)


def per_participation(guarantee: "Guarantee") -> float | None:
    """Bound epsilon of the least noisy message by itself; None where no client adds noise.

    **Guarantee:** exact Gaussian DP of one message; `tests/accounting/test_local.py`.
    """
    noise = [e.noise_multiplier for e in guarantee.events if isinstance(e, LocalGaussian)]
    if not noise:
        return None
    scale = 1.0 if guarantee.relation == "zero_out" else 2.0
    return GaussianProfile(scale / min(noise)).epsilon(guarantee.delta)


def epsilon_by_view(guarantee: "Guarantee", coalition: Profile) -> dict[str, float]:
    """Return epsilon by who looks; `coalition` is the account of all other clients together."""
    if is_local(guarantee):
        return _local(guarantee)
    bare = math.inf if guarantee.events else 0.0
    views = {
        "other_clients": guarantee.epsilon,
        "server": bare,
        "server_secure_aggregation": bare,
    }
    if guarantee.participation.kind == "fixed":
        together = coalition.epsilon(guarantee.delta)
        views |= {"outsider": guarantee.epsilon, "coalition_of_all_others": together}
        views["other_clients"] = together
    return views


def _local(guarantee: "Guarantee") -> dict[str, float]:
    summed = summed_profile(guarantee).epsilon(guarantee.delta)
    mixed = is_central(guarantee)
    return {
        "other_clients": guarantee.epsilon,
        "server": math.inf if mixed else guarantee.epsilon,
        "server_secure_aggregation": math.inf if mixed else summed,
        "outsider": summed,
    }


def reasons(guarantee: "Guarantee") -> dict[str, str]:
    """Say why a view has the epsilon that it has, where that is not obvious."""
    if is_central(guarantee):
        return {view: f"infinite: {why}" for view, why in _CENTRAL.items()}
    if not is_local(guarantee):
        return {}
    honest = min(e.honest for e in guarantee.events if isinstance(e, LocalGaussian))
    if honest == 1:
        trusted = "the noise of the client itself alone is counted on"
    else:
        trusted = f"{honest} honest clients, the protected one included, add their noise"
    return {
        "server": "the server sees each client's noisy message, and who sent it",
        "other_clients": "all others together can subtract their own messages from a post",
        "server_secure_aggregation": f"the server sees sums, and who took part; {trusted}",
        "outsider": f"an outsider sees posts alone; {trusted}",
    }
