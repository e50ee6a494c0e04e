"""Every method that trains by rounds of local steps: client-steps a second against FedAvg.

One process, one set of random rows for all (28 x 28 and 62 classes, as in FEMNIST; for the LSTM
texts of 20 characters), everybody in every round, central noise of multiplier 1. A client-step is
one gradient step of one client: both passes of ditto are counted, all local rounds of pfedme, steps
on heads as on layers. The time of a round is all of it: batches, steps, clip, sum, noise, ledger,
store. Of finetuning it is that of making everybody's model after the last round.

Methods take turns: in each sweep every method runs a round to warm up and some that are timed. A
cell is the median over sweeps of the method's speed over that of fedavg in the same sweep.

    python benchmarks/methods.py [--device cpu|cuda] [--quick] [--models cnn mlp ...]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from coterie.core.rng import Rng
from coterie.core.tree import size
from coterie.data.federated import FederatedDataset, Spec
from coterie.engine.simulate import simulate
from coterie.methods.base import Method
from coterie.methods.ditto import Ditto
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.naive_dp import NaiveDP
from coterie.methods.pfedme import PFedMe
from coterie.methods.pmtl import PMTL
from coterie.methods.ppsgd import PPSGD
from coterie.methods.related import Related
from coterie.models import CNN, MLP, Linear, Model
from coterie.models.module import Module
from coterie.models.zoo import CharLSTM
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.solvers.sgd import SGD

ROWS, BATCH, CLASSES, LENGTH, CLUSTERS = 40, 10, 62, 20, 4
LR, LAM = 0.05, 0.1
CLOCK = "cpu: processor seconds of this process, where others use the machine too"
# Clients and steps of a round: enough that a round is mostly steps, few enough to be done soon.
SIZES = {
    "cpu": {"linear": (64, 10), "mlp": (64, 10), "lstm": (24, 5), "cnn": (12, 4)},
    "cuda": {"linear": (100, 10), "mlp": (100, 10), "lstm": (100, 10), "cnn": (100, 10)},
}


class Network(nn.Module):
    """PMTL's network for FEMNIST, as a user writes it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout),
            nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout),
        )  # fmt: skip
        self.head = nn.Linear(1024, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of images."""
        return self.head(self.encoder(x[:, None]))


@dataclass(frozen=True)
class Entry:
    """A row of the table: a method, and the local steps of each of its rounds.

    `tuning` says that the steps are those after the last round instead.
    """

    name: str
    method: Method
    steps: tuple[SGD, ...]
    tuning: bool = False
    noise: str = "gaussian"
    speed: dict[str, str] = field(default_factory=dict)


def entries(model: Model, clients: int, sgd: SGD, device: str) -> Iterator[Entry]:
    """Return the methods that a model can be trained by, fedavg first."""
    last = replace(sgd, steps=None, epochs=1)
    base = FedAvg(model=model, sgd=sgd)
    yield Entry("fedavg", base, (sgd,))
    yield Entry("fedprox", FedAvg(model=model, sgd=sgd, prox=LAM), (sgd,))
    usual = PMTL(model=model, sgd=sgd, lam=LAM, last_solve=False)
    yield Entry("pmtl", usual, (sgd,))
    clusters = tuple(client % CLUSTERS for client in range(clients))
    yield Entry(f"pmtl, {CLUSTERS} clusters", replace(usual, clusters=clusters), (sgd,))
    related = Related(model=model, sgd=sgd, lam=LAM / 2, last_epochs=1)
    yield Entry("related, mean", related, (sgd,))
    ditto = Ditto(model=model, sgd=sgd, own_sgd=sgd, lam=LAM, last_epochs=1)
    yield Entry("ditto", ditto, (sgd, sgd))
    pfedme = PFedMe(model=model, sgd=sgd, lam=LAM, local_rounds=2, last_epochs=1)
    yield Entry("pfedme, 2 local rounds", pfedme, (sgd, sgd))
    if not isinstance(model, Linear):
        layers = DPFedMTL(model=model, sgd=sgd, head_epochs=1, last_solve=False)
        yield Entry("dpfedmtl", layers, (sgd,))
        yield Entry("dpfedmtl, alternate", replace(layers, alternate=True), (last, sgd))
        yield Entry("dpfedmtl, local noise", layers, (sgd,), noise="local")
    yield Entry("naive_dp", NaiveDP(model=model, sgd=sgd, lam=LAM), (sgd,))
    longer = replace(sgd, steps=None, epochs=4)
    for how in ("plain", "mean", "kl", "ewc"):
        tuned = Finetune(base=base, how=how, lam=LAM, sgd=longer)
        yield Entry(f"finetune, {how}", tuned, (longer,), tuning=True)
    if isinstance(model, Linear):
        yield Entry("ppsgd", PPSGD(model=model, sgd=sgd, last_epochs=1), (sgd,))
    if isinstance(model, Module):
        drops = FedAvg(model=Module(Network, {"dropout": 0.25}), sgd=sgd)
        yield Entry("fedavg, dropout", drops, (sgd,))
    if device == "cuda":
        yield Entry("fedavg, bfloat16", base, (sgd,), speed={"precision": "bfloat16"})


def rows_of(model: Model, clients: int) -> FederatedDataset:
    generator = torch.Generator().manual_seed(0)
    count = clients * ROWS
    if isinstance(model, CharLSTM):
        features = torch.randint(0, CLASSES, (count, LENGTH), generator=generator).float()
    else:
        features = torch.rand(count, 28, 28, generator=generator)
    return FederatedDataset(
        spec=Spec(tuple(features.shape[1:]), CLASSES, "multiclass", clients),
        names=[str(client) for client in range(clients)],
        offsets=np.arange(clients + 1, dtype=np.int64) * ROWS,
        features=features,
        targets=torch.randint(0, CLASSES, (count,), generator=generator),
    )


def client_steps(
    entry: Entry,
    data: FederatedDataset,
    rounds: int,
    speed: Speed,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Run a method and give its client-steps a second: the median of its rounds but the first."""
    stamps = []

    def stamp(progress: object = None) -> None:
        if speed.device == "cuda":
            torch.cuda.synchronize()
        stamps.append(clock())

    plan = Plan(
        method=entry.method,
        privacy=Privacy(noise_multiplier=1.0, clip=0.5, noise=entry.noise),
        rounds=1 if entry.tuning else 1 + rounds,
        simulation_seed=0,
    )
    outcome = simulate(plan, data, observe=stamp, speed=replace(speed, **entry.speed))
    stamp()
    assert outcome.zeroed == 0
    seconds = np.diff(stamps[-2:] if entry.tuning else stamps[:-1])
    counted = sum(int(sgd.count_steps(data.counts).sum()) for sgd in entry.steps)
    return counted / statistics.median(seconds)


def measure(model: Model, clients: int, steps: int, given: argparse.Namespace) -> dict[str, list]:
    """Return the speeds of each method, one for every sweep."""
    sgd = SGD(lr=LR, steps=steps, batch=BATCH)
    data = rows_of(model, clients).to(given.device)
    speed = Speed(device=given.device)
    methods = list(entries(model, clients, sgd, given.device))
    speeds: dict[str, list[float]] = {entry.name: [] for entry in methods}
    for entry in methods:  # compiles, records
        client_steps(entry, data, 1, speed)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[given.clock]
    for _ in range(given.sweeps):
        for entry in methods:
            speeds[entry.name].append(client_steps(entry, data, given.rounds, speed, clock))
    return speeds


def main() -> None:
    given = arguments()
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    models: dict[str, tuple[str, Model]] = {
        "linear": ("linear", Linear()),
        "mlp": ("mlp", MLP()),
        "cnn": ("cnn", CNN()),
        "module": ("cnn", Module(Network)),
        "char_lstm": ("lstm", CharLSTM(hidden=32)),
    }
    place = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()}"
    place += " CPU threads" * (given.device == "cpu")
    print(f"torch {torch.__version__}, {place}; {given.sweeps} sweeps of {given.rounds} rounds")
    begun, ratios = time.perf_counter(), {}
    try:
        for name in given.models or models:
            ratios[name] = ratios_of(name, *models[name], given)
    finally:
        show(ratios)
    print(f"{time.perf_counter() - begun:.0f} s in all")


def ratios_of(name: str, like: str, model: Model, given: argparse.Namespace) -> dict[str, float]:
    """Measure a model, say how fast fedavg is, and give all methods' speeds over it."""
    clients, steps = SIZES[given.device][like]
    if given.quick:
        clients, steps = clients // 2, steps // 2
    speeds = measure(model, clients, steps, given)
    numbers = size(model.init(rows_of(model, 1).spec, Rng.seeded(0)))
    base = speeds["fedavg"]
    print(
        f"{name}: {numbers:,} numbers, {clients} clients x {steps} steps of batch {BATCH}; "
        f"fedavg {statistics.median(base):,.0f} client-steps/s "
        f"({min(base):,.0f} to {max(base):,.0f})",
        flush=True,
    )
    return {method: statistics.median(np.array(found) / base) for method, found in speeds.items()}


def show(ratios: dict[str, dict[str, float]]) -> None:
    print(f"\n{'x fedavg':24}" + "".join(f"{name:>11}" for name in ratios))
    longest = sorted(ratios.values(), key=len, reverse=True)
    for method in dict.fromkeys(method for found in longest for method in found):
        cells = (found.get(method) for found in ratios.values())
        print(f"{method:24}" + "".join(f"{'' if c is None else f'{c:.2f}':>11}" for c in cells))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="a quarter of a round, one sweep")
    parser.add_argument("--models", nargs="*", help="only these", metavar="NAME")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help=CLOCK)
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds of a sweep")
    parser.add_argument("--sweeps", type=int, default=3)
    given = parser.parse_args()
    given.sweeps = 1 if given.quick else given.sweeps
    return given


if __name__ == "__main__":
    main()
