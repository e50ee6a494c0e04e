"""The two halves of a round, shared by the simulator and the deployed coordinator and sites.

An engine opens a charged release, calls `client_half` for its clients, adds what they return to
the release, and calls `server_half`:

    with billboard.charged(number) as release:
        half = client_half(state, personal, clients)
        release.add(half.part)
        shared, post = server_half(method, shared, release)

`client_half` runs on the client's side: rows and unbounded contributions never leave it.
`server_half` runs on the server's side and sees sealed sums and releases only.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, where_rows
from coterie.data.federated import Clients
from coterie.methods.base import Method
from coterie.privacy.billboard import Bounded, Post, Release, bound
from coterie.privacy.entropy import client_entropy
from coterie.privacy.mechanisms import Mechanism
from coterie.solvers.sgd import Precision, computed_in


@dataclass(frozen=True)
class RoundState:
    """What all clients of a round have in common; public except for the random stream.

    `simulation_seed` is the plan's, for noise that clients add themselves; `precision` changes
    speed only.
    """

    method: Method
    mechanism: Mechanism
    shared: Tree
    rng: Rng
    round: int
    simulation_seed: int | None = None
    precision: Precision = "float32"


class ClientHalf(NamedTuple):
    """The result of the client's half.

    `part` is the sealed sum of the bounded contributions, `personal` the new personal state, and
    `zeroed` marks clients whose contribution was not finite, (c,) bool.
    """

    part: Bounded
    personal: Tree
    zeroed: Tensor


def client_half(state: RoundState, personal: Tree, clients: Clients) -> ClientHalf:
    """Compute the stacked clients' updates and bound their contributions.

    A client whose update is not finite (its loss overflowed, its rows are broken) contributes zero
    and keeps the personal state that it had.
    """
    stream = state.rng.at("client", state.round)
    with computed_in(state.precision):
        after, rows = state.method.local_update(
            state.shared, personal, clients, stream, state.round
        )
    noise = client_entropy(state.simulation_seed, state.round)
    part, kept = bound(state.mechanism, rows, clients.ids, noise)
    after = state.method.on_clipped(personal, after, kept)
    zeroed = kept == 0
    if zeroed.is_cuda or bool(zeroed.any()):
        after = where_rows(zeroed, personal, after)
    return ClientHalf(part, after, zeroed)


def server_half(method: Method, shared: Tree, release: Release) -> tuple[Tree, Post]:
    """Publish the sum of the contributions, and update the shared tree by the release."""
    post = release.publish()
    return method.server_update(shared, post), post
