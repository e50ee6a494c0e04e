"""Local steps of convolutional models: client-steps a second, three ways.

205 clients with 170 images of 28 x 28, PMTL's network for FEMNIST (115,646 parameters); a round is
100 clients x 10 steps of batch 10 with a proximal term. Images are random numbers: only time is
measured. All three ways take the same steps on the same batches, which is checked first, in float32
proper (no TF32).

    python benchmarks/cnn.py [--device cpu|cuda] [--rounds 5] [--block 100]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree, stack, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.models import CNN
from coterie.solvers.sgd import SGD
from coterie.solvers.sgd_kernels import draw_batches

CLIENTS, ROWS, COHORT, STEPS, BATCH = 205, 170, 100, 10, 10
LAM, LR = 0.1, 0.05
SPEC = Spec(shape=(28, 28), outputs=62, task="multiclass", clients=CLIENTS)
Train = Callable[[Tree, Clients, Rng, Tree], Tree]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one to warm up")
    parser.add_argument("--block", type=int, default=COHORT, help="clients in a stack")
    given = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    data = images().to(given.device)
    shared = to(CNN().init(SPEC, Rng.seeded(0)), given.device)
    ways: dict[str, Train] = {
        "plain loop over clients": loop,
        "torch.func vmap": stacked(SGD(lr=LR, steps=STEPS, batch=BATCH, fast=False)),
        "coterie": stacked(SGD(lr=LR, steps=STEPS, batch=BATCH)),
    }
    place = (
        torch.cuda.get_device_name()
        if given.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    print(f"torch {torch.__version__}, {place}, blocks of {given.block}")
    print(f"largest difference after a round: {disagreement(ways, data, shared):.1e}")
    speeds = {name: measure(way, data, shared, given) for name, way in ways.items()}
    base = speeds["plain loop over clients"]
    print(f"{'':26}{'client-steps/s':>16}{'x loop':>9}")
    for name, speed in speeds.items():
        print(f"{name:26}{speed:16,.0f}{speed / base:9.2f}")


def images() -> FederatedDataset:
    generator = torch.Generator().manual_seed(0)
    return FederatedDataset(
        spec=SPEC,
        names=[str(client) for client in range(CLIENTS)],
        offsets=np.arange(CLIENTS + 1, dtype=np.int64) * ROWS,
        features=torch.rand(CLIENTS * ROWS, 28, 28, generator=generator),
        targets=torch.randint(0, 62, (CLIENTS * ROWS,), generator=generator),
    )


def stacked(sgd: SGD) -> Train:
    def train(start: Tree, clients: Clients, rng: Rng, anchor: Tree) -> Tree:
        return sgd(CNN(), start, clients, rng, anchor=anchor, lam=LAM)

    return train


def loop(start: Tree, clients: Clients, rng: Rng, anchor: Tree) -> Tree:
    """One client after the other, as one would write it with torch alone."""
    assert isinstance(clients.features, Tensor)
    steps = np.full(len(clients), STEPS, dtype=np.int64)
    drawn = draw_batches(rng.keys(clients.ids), clients.counts.numpy(), steps, BATCH)
    index = (torch.from_numpy(drawn).long() + clients.starts[:, None, None]).to(clients.device)
    names, rows = list(start), []
    for place in range(len(clients)):
        weights = [start[name][place].clone().requires_grad_() for name in names]
        for batch in index[place]:
            x, y = clients.features[batch], clients.targets[batch]
            loss = functional.cross_entropy(network(weights, x[:, None]), y)
            grads = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, grad, name in zip(weights, grads, names, strict=True):
                    weight.sub_(grad + LAM * (weight - anchor[name]), alpha=LR)
        rows.append([weight.detach() for weight in weights])
    return {
        name: torch.stack(leaves)
        for name, leaves in zip(names, zip(*rows, strict=True), strict=True)
    }


def network(weights: list[Tensor], x: Tensor) -> Tensor:
    for layer in (0, 2):
        x = functional.conv2d(x, weights[layer], weights[layer + 1]).relu()
        x = functional.max_pool2d(x, 2)
    return functional.linear(x.flatten(1), weights[4], weights[5])


def measure(way: Train, data: FederatedDataset, shared: Tree, given: argparse.Namespace) -> float:
    speeds = []
    for turn in range(1 + given.rounds):
        blocks = list(cohort(data, shared, turn, given.block))
        synchronise(given.device)
        begun = time.perf_counter()
        for start, clients in blocks:
            way(start, clients, Rng.seeded(turn), shared)
        synchronise(given.device)
        speeds.append(COHORT * STEPS / (time.perf_counter() - begun))
    return statistics.median(speeds[1:])


def cohort(
    data: FederatedDataset, shared: Tree, turn: int, block: int
) -> Iterator[tuple[Tree, Clients]]:
    ids = np.random.default_rng(turn).choice(CLIENTS, COHORT, replace=False)
    for clients in data.blocks(ids, block):
        yield stack(shared, len(clients)), clients


def disagreement(ways: dict[str, Train], data: FederatedDataset, shared: Tree) -> float:
    # In double precision: a rectifier that flips by rounding would look like an error.
    assert isinstance(data.features, Tensor)
    clients = replace(data, features=data.features.double()).clients(np.arange(4))
    doubles = {name: leaf.double() for name, leaf in shared.items()}
    results = [way(stack(doubles, 4), clients, Rng.seeded(0), doubles) for way in ways.values()]
    return max(
        float((result[name] - results[0][name]).abs().max())
        for result in results[1:]
        for name in shared
    )


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
