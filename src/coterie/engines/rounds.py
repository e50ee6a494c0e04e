"""The round, once: the client's half and the server's half, whatever carries messages between them.

`client_half` runs on the client's side of the wall: rows and unbounded contributions never leave
it. `server_half` runs on the server's side and sees sealed sums and posts alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.data.federated import Clients
from coterie.methods.base import Method
from coterie.privacy.accounting import Guarantee
from coterie.privacy.billboard import Billboard, Bounded, Post, bound
from coterie.privacy.entropy import client_entropy
from coterie.privacy.mechanisms import Mechanism
from coterie.rng import Rng
from coterie.solvers.sgd import Precision, computed_in
from coterie.tree import Tree, map_leaves


@dataclass(frozen=True)
class RoundState:
    """What is the same for every client of a round; all public but for the clients' coins.

    `simulation_seed` is that of the plan, for noise that clients add themselves; `precision` is a
    setting of speed.
    """

    method: Method
    mechanism: Mechanism
    shared: Tree
    rng: Rng
    round: int
    simulation_seed: int | None = None
    precision: Precision = "float32"


def client_half(state: RoundState, personal: Tree, clients: Clients) -> tuple[Bounded, Tree]:
    """Do the stacked clients' work of a round.

    Returns:
        The sealed sum of their bounded contributions, and their new personal state.
    """
    part, after, _ = clients_work(state, personal, clients)
    return part, after


def clients_work(
    state: RoundState, personal: Tree, clients: Clients
) -> tuple[Bounded, Tree, Tensor]:
    """Do the work of `client_half`, and say which clients' contributions became zero, (c,) bool.

    A client whose steps end in no numbers (its loss overflowed, its rows are broken) contributes
    zero, as the clip makes of it, and keeps the state that it had: its own business.
    """
    coins = state.rng.at("client", state.round)
    with computed_in(state.precision):
        after, rows = state.method.local_update(state.shared, personal, clients, coins, state.round)
    noise = client_entropy(state.simulation_seed, state.round)
    part, kept = bound(state.mechanism, rows, clients.ids, noise)
    settled = state.method.settle(personal, after, kept)
    failed = kept == 0
    if failed.is_cuda or bool(failed.any()):
        settled = map_leaves(lambda new, old: _keep(failed, new, old), settled, personal)
    return part, settled, failed


def _keep(failed: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(failed.to(new.device).reshape(-1, *[1] * (new.dim() - 1)), old, new)


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
