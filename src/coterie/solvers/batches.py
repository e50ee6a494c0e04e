"""Batches: laid out for stacked steps, and drawn without numba where it is missing."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Clients
from coterie.solvers.objective import Batch

Integers = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Rows:
    """The batches of some clients, those with many steps first: who is still at work comes first.

    A batch that is not full repeats its first row with a share of zero: no masks, and no row from
    outside the batch can spoil it.
    """

    clients: Clients
    places: Tensor  # (c,) where these clients are in the stack
    index: Tensor  # (steps, c, batch) rows of the flat arrays
    share: Tensor  # (steps, c, batch) one over the number of rows in the batch, or 0
    busy: list[int]  # (steps,) how many clients take the step
    coins: Tensor | None = None  # (steps, c) a word of each client's own, for models that draw

    @classmethod
    def plan(
        cls,
        clients: Clients,
        places: Integers,
        batches: Any,
        steps: Integers,
        params: Tree,
        coins: Rng | None = None,
    ) -> "Rows":
        """Lay out the batches of the clients at these places."""
        longest = int(steps[places].max(initial=0))
        local = np.ascontiguousarray(batches[places, :longest].transpose(1, 0, 2))
        missing = local < 0
        index = np.where(missing, local[:, :, :1], local) + clients.starts.numpy()[places, None]
        share = ~missing / np.maximum((~missing).sum(axis=2, keepdims=True), 1)
        like = next(iter(params.values()))
        busy = (steps[places][None, :] > np.arange(longest)[:, None]).sum(axis=1)
        dense = isinstance(clients.features, Tensor)
        words = None
        if coins is not None:
            drawn = coins.words(clients.ids.numpy()[places], np.arange(longest)[:, None])
            words = torch.from_numpy(drawn.astype(np.int64)).to(like.device)
        return cls(
            clients=clients,
            places=torch.from_numpy(places).to(like.device),
            index=torch.from_numpy(index).to(like.device if dense else "cpu"),
            share=torch.from_numpy(share).to(like),
            busy=busy.tolist(),
            coins=words,
        )

    def at(self, step: int) -> Batch:
        """Gather a step: rows, targets, the share of each row in its batch, and coins."""
        share = self.share[step, : self.busy[step]]
        index = self.index[step, : self.busy[step]]
        if isinstance(self.clients.features, Tensor):
            x = self.clients.features[index]
        else:
            picked = self.clients.features[index.reshape(-1).numpy()].toarray()
            x = torch.from_numpy(picked).reshape(*index.shape, *self.clients.spec.shape)
        coins = None if self.coins is None else self.coins[step, : self.busy[step]]
        return Batch(x.to(share), self.clients.targets[index], share, coins)


def draw_plainly(
    keys: NDArray[np.uint64], counts: Integers, steps: Integers, batch: int
) -> NDArray[np.int32]:
    """Draw the batches of `kernels.draw_batches`, the same ones, where numba is missing."""
    out = np.full((len(keys), int(steps.max(initial=0)), batch), -1, dtype=np.int32)
    order = np.tile(np.arange(counts.max(initial=0)), (len(keys), 1))
    state, done = keys.copy(), np.zeros(len(keys), dtype=np.int64)
    while (active := (done < steps) & (counts > 0)).any():
        reach = np.where(active, np.minimum(counts, (steps - done) * batch), 0)
        jumps = _draw_jumps(state, counts, reach)
        clients = np.arange(len(keys))
        for place, jump in enumerate(jumps.T):
            kept = order[:, place].copy()
            order[:, place] = order[clients, place + jump]
            order[clients, place + jump] = kept
        for client in np.flatnonzero(active):
            end = done[client] + -(-reach[client] // batch)
            rows = out[client, done[client] : end].reshape(-1)
            rows[: reach[client]] = order[client, : reach[client]]
            done[client] = end
    return out


def _draw_jumps(state: NDArray[np.uint64], counts: Integers, reach: Integers) -> Integers:
    # Jump p of a client is uniform below count - p: SplitMix64, reduced without bias (Lemire 2019).
    # A refused word shifts all later ones of its client by one. Moves the states on.
    places = np.arange(reach.max(initial=0))
    inside = places < reach[:, None]
    bounds = np.where(inside, counts[:, None] - places, 1).astype(np.uint64)
    floors = (np.uint64(1 << 32) - bounds) % bounds
    number: NDArray[np.uint64] = np.tile(places + 1, (len(reach), 1)).astype(np.uint64)
    with np.errstate(over="ignore"):
        while True:
            words = _mix(state[:, None] + number * _GOLDEN)
            products = (words >> np.uint64(32)) * bounds
            refused = (products & np.uint64(0xFFFFFFFF)) < floors
            if not refused.any():
                break
            number += (refused.cumsum(axis=1) > 0).astype(np.uint64)
        used = np.where(reach > 0, number[np.arange(len(reach)), reach - 1], np.uint64(0))
        state += used * _GOLDEN
    return (products >> np.uint64(32)).astype(np.int64)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
