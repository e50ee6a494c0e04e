"""The two halves of a round, shared by the simulator and the deployed coordinator and sites.

An engine opens a charged release, calls `client_half` for its clients, adds what they return to
the release, and calls `server_half`:

    with billboard.charged(number) as release:
        half = client_half(state, personal, clients)
        release.add(half.part)
        shared, post = server_half(method, shared, release)

`client_half` runs on the client's side: rows and unbounded contributions never leave it.
`server_half` runs on the server's side and sees sealed sums and releases only.

**A client's failure is its own.** Stacked clients are computed together. If that raises (the rows
of one do not fit into memory, a user's code divides by zero), they are computed one by one, and a
client that raises again contributes zeros, with its own noise where clients add it. Methods of
other packages are always computed one by one, unless they are registered with `stacked=True`.

**Guarantee:** no exception leaves `client_half` because of a client's rows, and rows of one client
change no contribution but its own, to the last bit (docs/adr/0009-floating-point.md, "Stacked
networks", which names one exception). So neighbouring federations differ by one bounded
contribution, whatever one client's rows do to the computation. Assumes that the process survives:
`most_rows` limits memory and time. For methods of other packages `check_separate` tests the second
part on made-up rows before anything is charged. Tests: tests/engine/test_rounds.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to, where_rows
from coterie.data.federated import Clients, FederatedDataset, Spec, offsets_of
from coterie.methods.base import Method, Shape, is_ours, is_stacked, per_row_leaves
from coterie.privacy.billboard import Bounded, Post, Release, absent_shares, bound
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

    `part` is the sealed sum of the bounded contributions and `personal` the new personal state.
    `zeroed` marks clients whose contribution was not finite or not computed, (c,) bool. `errors`
    says why, one line for each client whose computation raised. Both are for the owner of the rows
    only.
    """

    part: Bounded
    personal: Tree
    zeroed: Tensor
    errors: tuple[str, ...] = ()


def client_half(state: RoundState, personal: Tree, clients: Clients) -> ClientHalf:
    """Compute the stacked clients' updates and bound their contributions.

    A client whose update is not finite (its loss overflowed, its rows are broken), or raises,
    contributes zero and keeps the personal state that it had.
    """
    if len(clients) > 1 and not is_stacked(state.method):
        return _one_by_one(state, personal, clients)
    try:
        return _stacked_half(state, personal, clients)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    # Here the error and its frames are gone, and with them the memory that they held.
    if len(clients) > 1:
        return _one_by_one(state, personal, clients)
    half = no_contribution(state, personal, clients)
    return half._replace(errors=(f"client {int(clients.ids[0])}: {why}",))


def no_contribution(state: RoundState, personal: Tree, clients: Clients) -> ClientHalf:
    """Return the half of clients that contribute zeros; where clients add noise, they add it."""
    template = state.method.contribution(clients.spec)
    zeros = {
        name: torch.zeros((len(clients), *leaf.shape), dtype=leaf.dtype, device=clients.device)
        for name, leaf in template.items()
    }
    noise = client_entropy(state.simulation_seed, state.round)
    part, kept = bound(state.mechanism, zeros, clients.ids, noise)
    return ClientHalf(part, personal, torch.ones_like(kept, dtype=torch.bool))


def absent_half(
    state: RoundState, spec: Spec, cohort: NDArray[np.int64], ids: NDArray[np.int64] | range
) -> Bounded | None:
    """Return the shares of noise of those clients who are not drawn; None if they add none."""
    if not state.mechanism.in_shares:
        return None  # a round must not take time for clients that are not drawn
    rest = np.setdiff1d(np.asarray(ids), cohort)
    if not len(rest):
        return None
    contribution = state.method.contribution(spec)
    totals = state.mechanism.totals({n: tuple(leaf.shape) for n, leaf in contribution.items()})
    noise = client_entropy(state.simulation_seed, state.round)
    return absent_shares(state.mechanism, totals, torch.from_numpy(rest), noise)


def personal_models(
    method: Method, shared: Tree, personal: Tree, clients: Clients, stream: Rng
) -> tuple[Tree, tuple[str, ...]]:
    """Return each client's model after the last round, and the errors of clients without one.

    As in `client_half`, a client's failure is its own: it gets the model of a client without rows.
    """

    def model(own: Tree, rows: Clients) -> Tree:
        return method.personalise(shared, own, rows, stream)

    if is_stacked(method):
        try:
            return model(personal, clients), ()
        except Exception as error:
            if len(clients) == 0:
                raise
            why = f"{type(error).__name__}: {error}"
    made, errors = [], []
    for one, own in _each(method, shared, personal, clients):
        try:
            made.append(model(own, one))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            errors.append(f"client {int(one.ids[0])}: {why}")
            nobody = replace(one, counts=torch.zeros_like(one.counts))
            first = method.init_client_state(shared, one.spec, 1)
            made.append(model(first, nobody))
    return {name: torch.cat([one[name] for one in made]) for name in made[0]}, tuple(errors)


def _one_by_one(state: RoundState, personal: Tree, clients: Clients) -> ClientHalf:
    """Compute clients one at a time, so that one that fails takes no other with it."""
    halves = [
        client_half(state, own, one)
        for one, own in _each(state.method, state.shared, personal, clients)
    ]
    part = halves[0].part
    for half in halves[1:]:
        part = part + half.part
    after = {name: _joined([half.personal[name] for half in halves]) for name in personal}
    errors = tuple(line for half in halves for line in half.errors)
    return ClientHalf(part, after, torch.cat([half.zeroed for half in halves]), errors)


def _each(
    method: Method, shared: Tree, personal: Tree, clients: Clients
) -> Iterator[tuple[Clients, Tree]]:
    """Yield clients one at a time, with their personal state."""
    ragged = per_row_leaves(method.init_client_state(shared, clients.spec, 1))
    for place, count in enumerate(clients.counts.tolist()):
        own = {name: leaf[place : place + 1] for name, leaf in personal.items()}
        for name in ragged:
            own[name] = own[name][:, :count]
        yield clients.at(torch.tensor([place])), own


def _joined(leaves: list[Tensor]) -> Tensor:
    """Stack clients' leaves again, padded with zeros to the longest."""
    longest = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in leaves), strict=True)]
    joined = leaves[0].new_zeros(len(leaves), *longest)
    for place, leaf in enumerate(leaves):
        own = joined[place]
        for axis, length in enumerate(leaf.shape[1:]):
            own = own.narrow(axis, 0, length)
        own.copy_(leaf[0])
    return joined


def _stacked_half(state: RoundState, personal: Tree, clients: Clients) -> ClientHalf:
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


def server_half(
    method: Method, shared: Tree, release: Release, on_device: bool = False
) -> tuple[Tree, Post]:
    """Publish the sum of the contributions, and update the shared tree by the release.

    With `on_device`, the tree is updated where the release was made.
    """
    post = release.publish()
    if not on_device:
        post = post.on("cpu")
    return method.server_update(to(shared, post.device), post), post


def check_separate(method: Method, spec: Spec) -> None:
    """Raise ValueError if one client's rows move another's contribution, on made-up rows.

    For methods of other packages, called as a round calls them, with two stacks that differ in the
    rows of one client. It finds code that mixes clients, or keeps something of one client for the
    next; it cannot find code that does so on some rows only.
    """
    if is_ours(method) or method.shape in (Shape.NONE, Shape.POOLED) or spec.clients < 2:
        return
    try:
        before, after = (_replay(method, spec, rows) for rows in (4, 7))
    except Exception as error:
        raise ValueError(
            f"{method.kind} raised {type(error).__name__} on made-up rows of shape {spec.shape} "
            f"({error}): correct its local_update"
        ) from error
    # Stacked arithmetic may differ in the last bits; a client that is called alone may not.
    slack = 1e-5 if is_stacked(method) else 0.0
    for name, leaf in before.items():
        scale = float(leaf.abs().max()) if leaf.numel() else 0.0
        if not torch.allclose(leaf, after[name], rtol=0, atol=slack * scale, equal_nan=True):
            raise ValueError(
                f"{method.kind} mixes clients: rows of client 0 were changed, and {name!r} of "
                "another client's contribution moved. No guarantee covers that. A client's "
                "contribution must be a function of the shared tree, its own state, its own rows "
                "and the random stream"
            )


def _replay(method: Method, spec: Spec, rows: int) -> Tree:
    """Return the contributions of all made-up clients but the first, which has so many rows."""
    clients = _made_up(spec, rows)
    shared = method.init(spec, Rng.seeded(0))
    personal = dict(method.init_client_state(shared, spec, len(clients)))
    for name in per_row_leaves(personal):
        leaf = personal[name]
        personal[name] = leaf.new_zeros(len(clients), clients.longest, *leaf.shape[2:])
    stream = Rng.seeded(0).at("client", 0)
    if is_stacked(method):
        found = [method.local_update(shared, personal, clients, stream, 0)[1]]
    else:
        each = _each(method, shared, personal, clients)
        found = [method.local_update(shared, own, one, stream, 0)[1] for one, own in each]
    return {name: torch.cat([one[name] for one in found])[1:] for name in found[0]}


def _made_up(spec: Spec, rows: int) -> Clients:
    """Return up to three clients with made-up rows: `rows` of the first, four of the others."""
    counts = [rows, 4, 4][: spec.clients]
    # Drawn in reverse, so that the others' rows are the same for any number of the first.
    size = sum(counts)
    features = np.random.default_rng(0).integers(0, 2, (size, *spec.shape)).astype(np.float32)
    labels = (size, spec.outputs) if spec.task == "multilabel" else (size,)
    classes = spec.outputs if spec.task == "multiclass" else 2
    targets = np.random.default_rng(1).integers(0, classes, labels)
    kind = np.int64 if spec.task == "multiclass" else np.float32
    data = FederatedDataset(
        spec=replace(spec, clients=len(counts)),
        names=[str(number) for number in range(len(counts))],
        offsets=offsets_of(counts),
        features=torch.from_numpy(features[::-1].copy()),
        targets=torch.from_numpy(targets[::-1].astype(kind)),
    )
    return replace(data.clients(np.arange(len(counts))), spec=spec)
