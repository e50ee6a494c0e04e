"""The regression simulation of the MTL-SVM paper, as far as the paper says what it did.

Ponomarenko-Timofeev et al. train 20 clients on n_k = 200 rows of d = 200 features, with noise at a
signal-to-noise ratio of 20 dB; rows are alike over clients, or their mean and variance are set per
client. Of each client's rows 70 % are for training. How the clients' models relate, and how means
and variances were set, is not printed; what is done here is written down in `mtlsvm_regression`.

Everything follows from the seed, and the clients of a smaller federation are the first of a larger
one, rows included.
"""

import math

import numpy as np
import torch

from coterie.core.rng import Rng
from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.synthetic import ClientNames, Floats, Synthetic

LARGEST_MEAN = 1.0
"""Unequal clients: the means of their rows are uniform between minus and plus this."""
LARGEST_SPREAD = 2.0
"""Unequal clients: the standard deviations of their rows lie between 1 over this and this."""


def mtlsvm_regression(
    *,
    clients: int = 20,
    rows: int = 200,
    features: int = 200,
    test: float | int = 0.3,
    snr_db: float = 20.0,
    unequal: bool = False,
    relatedness: float = 0.9,
    seed: int = 0,
) -> Synthetic:
    """Generate the regression simulation: y = x w_k + noise, without intercept.

    The model of client k is w_k = sqrt(r) w + sqrt(1 - r) u_k with w and all u_k independent
    N(0, I / features) and r = `relatedness`: w_k has norm about 1, any two of them correlation
    about r, and x w_k has variance about 1 where entries of x are N(0, 1).

    Entries of x are N(0, 1) for every client, or N(m_k, s_k^2) if `unequal`, with m_k uniform on
    [-1, 1] and s_k between 1/2 and 2, its logarithm uniform. The noise of client k is normal of
    variance s_k^2 |w_k|^2 / 10^(snr_db / 10): every client has the same signal-to-noise ratio,
    where signal is the variance of x w_k and not the square of its mean.

    At the defaults, the mean over clients of test R^2 (against the client's own mean) is 0.66 for
    ridge alone, 0.88 for one ridge model of all clients and 0.94 for ridge on w + v_k, each with
    its best penalties (0.66, 0.82 and 0.94 if `unequal`); the true models have 0.99 (5 seeds,
    standard errors up to 0.01, 0.02 for one model of unequal clients).

    Args:
        clients: How many clients.
        rows: Rows of each, training and test together.
        features: Numbers in one row.
        test: Test rows of each: a share of its rows (float), or their number (int). They are
            declared as the source's split.
        snr_db: Signal-to-noise ratio in decibels; inf is no noise.
        unequal: Whether clients differ in mean and variance of their rows.
        relatedness: Correlation of clients' models, from 0 (nothing in common) to 1 (one model).
        seed: Seed of everything.

    Returns:
        The data and truth; `shared` is sqrt(r) w.

    Raises:
        DataError: If an option is out of range.
    """
    held = _held_out(rows, test)
    _check(clients, features, snr_db, relatedness)
    rng = Rng.seeded(seed).at("mtlsvm", "regression")
    shared = _normal(rng.at("shared"), (1, features)) * math.sqrt(relatedness / features)
    own = _normal(rng.at("own"), (clients, features)) * math.sqrt((1 - relatedness) / features)
    own += shared
    x = _normal(rng.at("rows"), (clients, rows, features))
    deviation = np.ones(clients, dtype=np.float32)
    if unequal:
        drawn = rng.at("unequal").numpy().uniform(-1, 1, (clients, 2))
        deviation = (LARGEST_SPREAD ** drawn[:, 1]).astype(np.float32)
        x *= deviation[:, None, None]
        x += (LARGEST_MEAN * drawn[:, 0]).astype(np.float32)[:, None, None]
    noise = deviation * np.linalg.norm(own, axis=1) * np.float32(10 ** (-snr_db / 20))
    y = np.einsum("knd,kd->kn", x, own) + _normal(rng.at("noise"), (clients, rows)) * noise[:, None]
    what = f"{'unequal' if unequal else 'equal'} clients, relatedness {relatedness:g}"
    return Synthetic(
        data=_federated(x, y, held, f"{what}, {snr_db:g} dB, seed {seed}"),
        truth={"weight": torch.from_numpy(own[:, None]), "bias": torch.zeros(clients, 1)},
        shared={"weight": torch.from_numpy(shared), "bias": torch.zeros(1)},
    )


def _held_out(rows: int, test: float | int) -> int:
    share = isinstance(test, float)
    sound = 0 <= test < (1 if share else rows)
    held = round(rows * test) if sound and share else test
    if not sound or held >= rows:
        raise DataError(
            f"rows = {rows}, test = {test}: expected a share from 0 to below 1, or a number of "
            "test rows that leaves at least 1 of the rows for training"
        )
    return int(held)


def _check(clients: int, features: int, snr_db: float, relatedness: float) -> None:
    for name, value in (("clients", clients), ("features", features)):
        if value < 1:
            raise DataError(f"{name} = {value}: expected a whole number of 1 or more")
    if not -math.inf < snr_db:
        raise DataError(f"snr_db = {snr_db}: expected decibels, such as 20; inf for no noise")
    if not 0 <= relatedness <= 1:
        raise DataError(f"relatedness = {relatedness}: expected a number from 0 to 1")


def _normal(rng: Rng, shape: tuple[int, ...]) -> Floats:
    return rng.numpy().standard_normal(shape, dtype=np.float32)


def _federated(x: Floats, y: Floats, held: int, what: str) -> FederatedDataset:
    clients, rows, features = x.shape
    split = (np.arange(rows) >= rows - held).astype(np.int8)
    return FederatedDataset(
        spec=Spec(shape=(features,), outputs=1, task="regression", clients=clients),
        names=ClientNames(clients),
        offsets=np.arange(clients + 1, dtype=np.int64) * rows,
        features=torch.from_numpy(x.reshape(-1, features)),
        targets=torch.from_numpy(y.reshape(-1)),
        source_split=np.tile(split, clients),
        title="mtlsvm:regression",
        notes=(
            f"generated: {what}; after Ponomarenko-Timofeev et al., MTL-SVM",
            "true models have no intercept",
        ),
    )
