"""The simulations of published papers, by name, as far as the papers say what they did.

`mpmtl_low_rank`, `mpmtl_group_sparse` and `figure2` are those of Liang, Liu, Zhou, Jiang, Zhang,
Wang, "Model-Protected Multi-Task Learning". Rows have N(0, 1) entries and are then scaled to l2
norm 1; targets are x w_k + N(0, noise^2), without intercept; training and test rows of each client
are drawn apart and declared as the source's split.

Everything follows from the seed. Clients are drawn one after the other, so that those of a smaller
federation are the first of a larger one (models, rows and targets), and a client's training rows do
not depend on how many test rows there are: the error of the first 20 clients can be plotted against
the number of clients.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.rng import Rng
from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.synthetic import ClientNames, Floats, Synthetic

LOW_RANK_SCALE = 2.25
"""Standard deviation of x w_k, about, in the low-rank simulation."""
LOW_RANK_JITTER = 0.3
"""How far clients of a group are apart, in units of their common direction."""
SMALLEST, LARGEST = 1.0, 50.0
"""Ends of the absolute values of the group-sparse simulation's weights."""


def mpmtl_low_rank(
    *,
    clients: int = 320,
    train: int = 30,
    test: int = 270,
    features: int = 30,
    rank: int = 5,
    noise: float = 1.0,
    seed: int = 0,
) -> Synthetic:
    """Generate the low-rank simulation: related, opposed and unrelated clients.

    The paper draws W (features x clients) from MatrixNormal(0, I, Sigma) and shows Sigma as a
    picture only. Here Sigma = s^2 B B^T with s = `LOW_RANK_SCALE`, so that W = s A B^T with A
    (features x rank) of independent N(0, 1) entries. Row b_k of B (clients x rank) is a unit
    vector: client k is in group g = k mod 2 rank, whose direction is +e_g for g < rank and
    -e_(g - rank) for the others, and b_k = (direction + j u_k) / |direction + j u_k| with
    u_k ~ N(0, I / rank) and j = `LOW_RANK_JITTER`. So Sigma has blocks (clients put in order of
    their groups) of correlations about 0.9 inside a group, -0.9 between a group and its opposite,
    and 0 elsewhere; its rank is min(rank, clients), and so is that of W.

    At the defaults, with the best penalties, learning alone by ridge has test nMSE 0.478 +- 0.009
    and the trace norm without privacy 0.239 +- 0.007 (8 seeds).

    Args:
        clients: How many clients.
        train: Training rows of each.
        test: Test rows of each.
        features: Numbers in one row.
        rank: Of W.
        noise: Standard deviation of the noise on targets. The paper's is 1, which leaves a test
            nMSE of about 1 / (1 + s^2) = 0.165 to the true models here. Its non-private 0.014 means
            that its own Sigma was larger; noise = 0.22 gives as much (0.0146, alone 0.107).
        seed: Seed of everything.

    Returns:
        The data and truth; `shared` are the groups' models s A direction, stacked, and `cluster`
        the clients' groups.

    Raises:
        DataError: If an option is out of range.
    """
    _check(clients, train, test, features, noise)
    if not 1 <= rank <= features:
        raise DataError(f"rank = {rank}: expected 1 to features = {features}")
    rng = Rng.seeded(seed).at("mpmtl", "low_rank")
    basis = rng.at("basis").numpy().standard_normal((features, rank))
    directions = np.concatenate([np.eye(rank), -np.eye(rank)])
    group = np.arange(clients) % len(directions)
    apart = rng.at("jitter").numpy().standard_normal((clients, rank)) / math.sqrt(rank)
    rows = directions[group] + LOW_RANK_JITTER * apart
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return _generate(
        f"low_rank, rank {rank}",
        weight=LOW_RANK_SCALE * rows @ basis.T,
        shared=LOW_RANK_SCALE * (directions @ basis.T)[:, None],
        cluster=torch.from_numpy(group),
        sizes=(train, test),
        noise=noise,
        seed=seed,
        rng=rng,
    )


def mpmtl_group_sparse(
    *,
    clients: int = 320,
    train: int = 30,
    test: int = 270,
    features: int = 30,
    active: int = 4,
    noise: float = 1.0,
    seed: int = 0,
) -> Synthetic:
    """Generate the group-sparse simulation: all clients use the same few features.

    The first `active` weights of every client are independent and uniform on [-50, -1] and
    [1, 50], the others 0.

    Args:
        clients: How many clients.
        train: Training rows of each.
        test: Test rows of each.
        features: Numbers in one row.
        active: Features in use.
        noise: Standard deviation of the noise on targets.
        seed: Seed of everything.

    Returns:
        The data and truth; `shared` is the models' mean, 0.

    Raises:
        DataError: If an option is out of range.
    """
    _check(clients, train, test, features, noise)
    if not 1 <= active <= features:
        raise DataError(f"active = {active}: expected 1 to features = {features}")
    rng = Rng.seeded(seed).at("mpmtl", "group_sparse")
    # One number decides size and sign, so that a client's draws stay next to each other.
    drawn = rng.at("weights").numpy().uniform(-1, 1, (clients, active))
    few = np.sign(drawn) * (SMALLEST + (LARGEST - SMALLEST) * np.abs(drawn))
    weight = np.zeros((clients, features))
    weight[:, :active] = few
    return _generate(
        f"group_sparse, {active} active features",
        weight=weight,
        shared=np.zeros((1, features)),
        cluster=None,
        sizes=(train, test),
        noise=noise,
        seed=seed,
        rng=rng,
    )


def figure2(seed: int = 0) -> NDArray[np.float64]:
    """Draw the 5 x 10 models (one a column) of the paper's Figure 2: the last is an outlier.

    Entries are U(0, 1), those of the last column times 100.

    >>> figure2().shape, bool(figure2()[:, :9].max() < 1 < figure2()[:, 9].max())
    ((5, 10), True)
    """
    models = Rng.seeded(seed).at("mpmtl", "figure2").numpy().random((5, 10))
    models[:, -1] *= 100
    return models


def _check(clients: int, train: int, test: int, features: int, noise: float) -> None:
    for name, value, least in (
        ("clients", clients, 1),
        ("train", train, 1),
        ("test", test, 0),
        ("features", features, 1),
    ):
        if value < least:
            raise DataError(f"{name} = {value}: expected a whole number of {least} or more")
    if not 0 <= noise < math.inf:
        raise DataError(f"noise = {noise}: expected a standard deviation of 0 or more")


def _generate(
    what: str,
    *,
    weight: NDArray[np.float64],
    shared: NDArray[np.float64],
    cluster: torch.Tensor | None,
    sizes: tuple[int, int],
    noise: float,
    seed: int,
    rng: Rng,
) -> Synthetic:
    """Draw rows and targets for models of shape (clients, features)."""
    clients, features = weight.shape
    own = weight.astype(np.float32)
    parts = [
        _rows(own, count, noise, rng.at(part))
        for part, count in zip(("train", "test"), sizes, strict=True)
    ]
    x, y = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    split = np.repeat(np.array([0, 1], dtype=np.int8), sizes)
    data = FederatedDataset(
        spec=Spec(shape=(features,), outputs=1, task="regression", clients=clients),
        names=ClientNames(clients),
        offsets=np.arange(clients + 1, dtype=np.int64) * sum(sizes),
        features=torch.from_numpy(x.reshape(-1, features)),
        targets=torch.from_numpy(y.reshape(-1)),
        source_split=np.tile(split, clients),
        title=f"mpmtl:{what.partition(',')[0]}",
        notes=(
            f"generated: {what}, noise {noise:g}, seed {seed}; after Liang et al., "
            "Model-Protected Multi-Task Learning",
            "rows have l2 norm 1; true models have no intercept",
        ),
    )
    truth = {"weight": torch.from_numpy(own[:, None]), "bias": torch.zeros(clients, 1)}
    centre = torch.from_numpy(shared.astype(np.float32))
    scattered = {"weight": centre, "bias": torch.zeros(centre.shape[:-1])}
    return Synthetic(data=data, truth=truth, shared=scattered, cluster=cluster)


def _rows(weight: Floats, count: int, noise: float, rng: Rng) -> tuple[Floats, Floats]:
    """Draw the rows (clients, count, features) and targets (clients, count) of all clients."""
    clients, features = weight.shape
    x = rng.at("rows").numpy().standard_normal((clients, count, features), dtype=np.float32)
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    y = rng.at("noise").numpy().standard_normal((clients, count), dtype=np.float32)
    y *= np.float32(noise)
    y += np.einsum("knd,kd->kn", x, weight)
    return x, y
