"""The round, once: the client's half and the server's half, whatever carries messages between them.

`client_half` runs on the client's side of the wall: rows and unbounded contributions never leave
it. `server_half` runs on the server's side and sees sealed sums and posts alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coterie.data.federated import Clients
from coterie.methods.base import Method
from coterie.privacy.accounting import Guarantee
from coterie.privacy.billboard import Billboard, Bounded, Post, bound
from coterie.privacy.mechanisms import Mechanism
from coterie.rng import Rng
from coterie.tree import Tree


@dataclass(frozen=True)
class RoundState:
    """What is the same for every client of a round; all public but for the clients' coins."""

    method: Method
    mechanism: Mechanism
    shared: Tree
    rng: Rng
    round: int


def client_half(state: RoundState, personal: Tree, clients: Clients) -> tuple[Bounded, Tree]:
    """Do the stacked clients' work of a round.

    Returns:
        The sealed sum of their bounded contributions, and their new personal state.
    """
    coins = state.rng.at("client", state.round)
    after, rows = state.method.local_update(state.shared, personal, clients, coins, state.round)
    part, kept = bound(state.mechanism, rows, clients.ids)
    return part, state.method.settle(personal, after, kept)


def server_half(
    method: Method, billboard: Billboard, shared: Tree, parts: Iterable[Bounded]
) -> tuple[Tree, Post]:
    """Post the sum of the parts and move the shared tree by it."""
    post = billboard.post(parts)
    return method.server_update(shared, post), post


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of a run."""

    rounds: float
    total: float


@dataclass(frozen=True)
class RunSummary:
    """What a finished run promises and took."""

    guarantee: Guarantee
    timing: Timing
