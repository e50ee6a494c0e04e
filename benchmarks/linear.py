"""Local SGD of many small logistic models: the fused kernel against a loop over clients.

    python benchmarks/linear.py              # 10,000 clients x 100 rows x 60 features
    python benchmarks/linear.py --million    # 1,000,000 clients x 20 rows x 20 features

The same mathematics on both sides: batches without replacement within an epoch, mean logistic loss,
a pull to the shared model. The loop is timed on a few clients and its rate taken for all.
"""

import argparse
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.rng import Rng
from coterie.solvers.sgd_kernels import linear_sgd

LR, LAM = 0.1, 0.1
Floats = NDArray[np.float32]
Round = Callable[[int], object]


def make(clients: int, rows: int, features: int) -> tuple[Floats, Floats]:
    generator = np.random.default_rng(0)
    x = np.empty((clients * rows, features), np.float32)
    generator.standard_normal(out=x, dtype=np.float32)
    y = np.empty(clients * rows, np.float32)
    for begin in range(0, len(y), 1 << 20):
        part = x[begin : begin + (1 << 20)]
        y[begin : begin + len(part)] = part.sum(axis=1) > 0
    return x, y


def kernel_round(x: Floats, y: Floats, clients: int, rows: int, steps: int, batch: int) -> Round:
    """Prepare one round of every client and return it as a function of the round number."""
    shared = np.zeros((1, x.shape[1]), np.float32), np.zeros(1, np.float32)
    weight = np.zeros((clients, 1, x.shape[1]), np.float32)
    bias = np.zeros((clients, 1), np.float32)
    ids = np.arange(clients)

    def run(number: int) -> object:
        return linear_sgd(
            weight, bias, features=x, targets=y, starts=ids * rows, counts=np.full(clients, rows),
            keys=Rng.seeded(0).at("client", number).keys(ids), steps=np.full(clients, steps),
            batch=batch, lr=LR, lam=LAM, anchor_weight=shared[0], anchor_bias=shared[1],
            task="binary",
        )  # fmt: skip

    return run


def loop_round(
    features: Floats, targets: Floats, clients: int, rows: int, steps: int, batch: int
) -> None:
    """Run one round as plain torch code would: a client, a batch, a backward pass at a time."""
    x, y = torch.from_numpy(features), torch.from_numpy(targets)
    shared = torch.zeros(x.shape[1]), torch.zeros(1)
    for client in range(clients):
        own = slice(client * rows, (client + 1) * rows)
        own_x, own_y = x[own], y[own]
        leaves = [leaf.clone().requires_grad_() for leaf in shared]
        batches: list[torch.Tensor] = []
        while len(batches) < steps:
            batches += torch.randperm(rows).split(batch)
        for chosen in batches[:steps]:
            scores = own_x[chosen] @ leaves[0] + leaves[1]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, own_y[chosen])
            gradients = torch.autograd.grad(loss, leaves)
            with torch.no_grad():
                for leaf, gradient, anchor in zip(leaves, gradients, shared, strict=True):
                    leaf.sub_(LR * (gradient + LAM * (leaf - anchor)))


def seconds(function: Round, repeats: int) -> list[float]:
    times = []
    for number in range(repeats):
        begin = time.perf_counter()
        function(number)
        times.append(time.perf_counter() - begin)
    return times


def resident(field: str) -> float:
    """Resident memory in MiB: VmRSS now, VmHWM the peak since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def describe(times: list[float]) -> str:
    return f"median {statistics.median(times):.3f} s, {min(times):.3f} .. {max(times):.3f}"


def title(settings: Namespace) -> str:
    return (
        f"{settings.clients:,} clients x {settings.rows} rows x {settings.features} features, "
        f"{settings.steps} steps of batch {settings.batch}, {numba.get_num_threads()} threads"
    )


def compare(settings: Namespace) -> None:
    x, y = make(settings.clients, settings.rows, settings.features)
    shape = (settings.rows, settings.steps, settings.batch)
    few = min(settings.loop_clients, settings.clients)
    torch.set_num_threads(1)  # such small products only get slower with more
    loop_round(x, y, min(few, 20), *shape)
    loop = seconds(lambda _: loop_round(x, y, few, *shape), settings.repeats)
    run = kernel_round(x, y, settings.clients, *shape)
    run(0)
    kernel = seconds(run, settings.repeats)
    rates = (
        few * settings.steps / statistics.median(loop),
        settings.clients * settings.steps / statistics.median(kernel),
    )
    whole = settings.clients * settings.steps / rates[0]
    print(title(settings))
    print(f"loop, {few} clients: {describe(loop)}: {rates[0]:,.0f} client-steps/s")
    print(f"loop, all {settings.clients} clients: {whole:.1f} s (extrapolated)")
    print(f"kernel, all clients: {describe(kernel)}: {rates[1]:,.0f} client-steps/s")
    print(f"ratio {rates[1] / rates[0]:.0f}")


def million(settings: Namespace) -> None:
    x, y = make(settings.clients, settings.rows, settings.features)
    shape = (settings.rows, settings.steps, settings.batch)
    run = kernel_round(x, y, settings.clients, *shape)
    kernel_round(x, y, min(settings.clients, 10), *shape)(0)  # compiles
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    times = seconds(run, settings.repeats)
    peak = resident("VmHWM")
    print(title(settings))
    print(f"a round: {describe(times)}")
    print(f"client-steps/s: {settings.clients * settings.steps / statistics.median(times):,.0f}")
    sizes = (x.nbytes / 2**20, 4 * x.shape[1] * settings.clients / 2**20)
    print("features {:,.0f} MiB, weights {:,.0f} MiB".format(*sizes))
    print(f"resident before {before:,.0f} MiB, peak {peak:,.0f} MiB: + {peak - before:,.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--million", action="store_true", help="1,000,000 clients, kernel alone")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--features", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--loop-clients", type=int, default=300, help="clients of the timed loop")
    parser.add_argument("--repeats", type=int, default=5)
    settings = parser.parse_args()
    sizes = (1_000_000, 20, 20) if settings.million else (10_000, 100, 60)
    for name, size in zip(("clients", "rows", "features"), sizes, strict=True):
        if getattr(settings, name) is None:
            setattr(settings, name, size)
    (million if settings.million else compare)(settings)


if __name__ == "__main__":
    main()
