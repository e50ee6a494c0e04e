"""Posteriors of many small clients: time against the number of clients, and against plain code.

Regression (20 rows of 20 features each) beside a batched version in torch and a loop over clients
in NumPy (on a part, scaled up); then the class tasks. Time should be linear in the clients, so
microseconds a client should be flat.

    python benchmarks/posterior.py [--clients 1000 10000 100000] [--rows 20] [--features 20]
"""

import argparse
import statistics
import time

import numba
import numpy as np
import torch

from coterie.data.federated import FederatedDataset, Spec
from coterie.solvers.posterior import Prior, posterior

RESIDUAL, VARIANCE = 0.5, 0.1
LOOPED = 2000  # clients of the loop in NumPy


def federation(task, clients, rows, features, outputs=1):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(clients * rows, features)).astype(np.float32)
    score = x @ generator.normal(size=(features, outputs)).astype(np.float32)
    score += generator.normal(size=score.shape).astype(np.float32)
    if task == "multiclass":
        y = torch.from_numpy(score.argmax(axis=1))
    else:
        y = torch.from_numpy(score[:, 0] if task == "regression" else 1.0 * (score[:, 0] > 0))
        y = y.float()
    spec = Spec((features,), outputs, task, clients)
    offsets = np.arange(clients + 1) * rows
    names = [str(place) for place in range(clients)]
    return FederatedDataset(spec, names, offsets, torch.from_numpy(x), y)


def prior_of(data):
    shape = (data.spec.outputs, data.spec.features)
    residual = RESIDUAL if data.spec.task == "regression" else 1.0
    center = torch.zeros(shape, dtype=torch.float64)
    return Prior(center, torch.full_like(center, VARIANCE), residual)


def batched(data, rows):
    """The same regression in torch: deviations and variances of all clients at once."""
    x = data.features.reshape(len(data), rows, -1).double() * VARIANCE**0.5
    y = data.targets.reshape(len(data), rows, 1).double()
    eye = torch.eye(x.shape[2], dtype=torch.float64)
    inverse = torch.linalg.inv(x.mT @ x / RESIDUAL + eye)
    deviation = (inverse @ (x.mT @ y))[..., 0] / RESIDUAL
    return deviation, inverse.diagonal(dim1=1, dim2=2)


def looped(data, rows, clients):
    """The same regression in NumPy, one client after the other."""
    x = data.features.numpy().reshape(len(data), rows, -1)
    y = data.targets.numpy().reshape(len(data), rows)
    found = []
    for own, target in zip(x[:clients], y[:clients], strict=True):
        z = own.astype(np.float64) * VARIANCE**0.5
        inverse = np.linalg.inv(z.T @ z / RESIDUAL + np.eye(z.shape[1]))
        found.append((inverse @ (z.T @ target) / RESIDUAL, np.diag(inverse)))
    return found


def seconds(function, repeats=5):
    function()
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def regression(clients, rows, features):
    data = federation("regression", clients, rows, features)
    everyone, prior = data.clients(np.arange(clients)), prior_of(data)
    found, plain = posterior(everyone, prior, bias=False), batched(data, rows)
    assert torch.allclose(found.deviation[:, 0], plain[0], atol=1e-9)
    assert torch.allclose(found.variances[:, 0], plain[1], atol=1e-9)
    ours = seconds(lambda: posterior(everyone, prior, bias=False))
    torchs = seconds(lambda: batched(data, rows), 3)
    part = min(clients, LOOPED)
    numpys = seconds(lambda: looped(data, rows, part), 3) * clients / part
    print(
        f"| {clients:,} | {ours:.4f} | {ours / clients * 1e6:.2f} "
        f"| {torchs / ours:.1f} | {numpys / ours:.1f} |",
        flush=True,
    )


def classes(task, clients, rows, features, outputs):
    data = federation(task, clients, rows, features, outputs)
    everyone, prior = data.clients(np.arange(clients)), prior_of(data)
    taken = seconds(lambda: posterior(everyone, prior, bias=False), 3)
    print(
        f"| {task} | {clients:,} | {rows} | {features} | {outputs} | {taken:.3f} "
        f"| {taken / clients * 1e6:.1f} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--features", type=int, default=20)
    given = parser.parse_args()
    print(f"{numba.get_num_threads()} threads; torch {torch.get_num_threads()}\n")
    print("| clients | s | us/client | torch, batched: times as long | NumPy, loop |")
    print("|---|---|---|---|---|")
    for clients in given.clients:
        regression(clients, given.rows, given.features)
    print("\n| task | clients | rows | features | outputs | s | us/client |")
    print("|---|---|---|---|---|---|---|")
    classes("binary", 20_000, given.rows, given.features, 1)
    classes("multiclass", 2_000, 40, 20, 5)
    classes("multiclass", 20, 150, 64, 62)


if __name__ == "__main__":
    main()
