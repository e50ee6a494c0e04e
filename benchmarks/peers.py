"""Rounds of a convolutional model: coterie against pfl-research 0.6, client-steps a second.

205 clients with 170 random images of 28 x 28, PMTL's network for FEMNIST (115,646 parameters); a
round is 100 clients x 10 steps of batch 10, updates clipped, summed and noised. Only time is
measured, in float32 proper (no TF32).

    python benchmarks/peers.py --peer-path DIR [--device cpu|cuda] [--rounds 5] [--ours] [--loop]

pfl trains one global model with FederatedAveraging, one client after the other: tensors on the
device from the start, batches cut once, no worker processes, no evaluation in timed rounds. It
takes the same ten batches of a client every time, in order; coterie draws batches anew, pulls to
the shared model and keeps a model per client. DIR holds pfl and packaging (`pip install --no-deps
--target DIR pfl==0.6.0 packaging`); what pfl imports but never uses here is stubbed if missing.

pfl's guide advises 1 to 5 processes on a GPU. --processes K runs K copies of pfl at once and adds
their speeds: an upper bound on what K workers could give it, since nothing is reduced between them.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLIENTS, ROWS, COHORT, STEPS, BATCH = 205, 170, 100, 10, 10
CLASSES, PARAMETERS = 62, 115_646
LR, LAM, CLIP, NOISE = 0.1, 0.1, 0.5, 1.0
# Rounds before the clock counts; pfl evaluates in its first, whatever it is told.
WARM_UP = 2
# On a GPU ours records a step for each size of cohort; most sizes should have been seen before the
# clock counts, and its rounds are short.
OUR_WARM_UP, OUR_ROUNDS = {"cpu": WARM_UP, "cuda": 5}, {"cpu": 1, "cuda": 4}
LAP = {"cpu": 1, "cuda": 5}  # rounds of a lap
# Imported by pfl 0.6 for privacy accountants, distributions and a sampler in a second process.
UNUSED = (
    "dp_accounting", "dp_accounting.dp_event",
    "dp_accounting.pld", "dp_accounting.pld.privacy_loss_distribution",
    "dp_accounting.rdp", "dp_accounting.rdp.rdp_privacy_accountant",
    "prv_accountant", "multiprocess", "scipy", "scipy.special", "scipy.stats",
)  # fmt: skip


def main() -> None:
    given = arguments()
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Any] = {
        "workload": "W1",
        "torch": torch.__version__,
        "device": place(given.device),
        "rounds": given.rounds,
    }
    speeds: dict[str, float] = {}
    # Ours first: pfl's stubs must not stand in for anything that coterie could use.
    if given.ours:
        speeds["coterie, PMTL"] = found["coterie"] = ours(given)
    if given.loop:
        speeds["plain loop, steps only"] = found["loop"] = loop(given)
    if given.processes > 1:
        speeds[f"pfl, {given.processes} processes"] = found["pfl"] = copies(given)
        found["processes"] = given.processes
    else:
        speeds["pfl, FederatedAveraging"] = found["pfl"] = peer(given)
    if given.ours:
        found["ratio"] = found["coterie"] / found["pfl"]
    print(f"torch {torch.__version__}, {found['device']}, median of {given.rounds} rounds")
    print(f"{'':26}{'client-steps/s':>16}{'x pfl':>9}")
    for name, speed in speeds.items():
        print(f"{name:26}{speed:16,.0f}{speed / found['pfl']:9.2f}")
    print(json.dumps(found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5, help=f"timed, after {WARM_UP} to warm up")
    parser.add_argument("--peer-path", metavar="DIR", help="where pfl is, if not installed")
    parser.add_argument("--processes", type=int, default=1, help="copies of pfl at once")
    parser.add_argument("--block", type=int, default=0, help="coterie's clients in a stack")
    parser.add_argument("--ours", action="store_true", help="time coterie too, in this process")
    parser.add_argument("--loop", action="store_true", help="time a plain loop over clients too")
    return parser.parse_args()


class Network(nn.Module):
    """PMTL's network, with the two methods that pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of images."""
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a local step, and count the step."""
        self.steps += 1
        return functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return what pfl evaluates in its first round."""
        from pfl.metrics import Weighted

        return {"loss": Weighted(float(functional.cross_entropy(self(x), y)) * len(y), len(y))}


def peer(given: argparse.Namespace) -> float:
    """Time pfl's rounds; every timed round is checked to be 100 clients of 10 steps."""
    find_peer(given)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

    torch.manual_seed(0)
    np.random.seed(0)
    x, y = (part.to(given.device) for part in rows())
    users = [
        PyTorchTensorDataset((x[begin : begin + ROWS, None], y[begin : begin + ROWS]), str(begin))
        for begin in range(0, CLIENTS * ROWS, ROWS)
    ]
    network = Network()
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    assert sum(weight.numel() for weight in network.parameters()) == PARAMETERS
    clock, work = Clock(given.device), []

    class Watch(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(
            self, aggregate_metrics: Any, model: object, *, central_iteration: int
        ) -> tuple[bool, Any]:
            clock.end_round()
            seen = aggregate_metrics.to_simple_dict()
            devices = [value for name, value in seen.items() if "number of devices" in name]
            assert devices == [COHORT], seen
            work.append(network.steps)
            network.steps = 0
            return False, Metrics()

    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(CLIENTS)))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[noise]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=WARM_UP + given.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH,
            local_num_epochs=None,
            local_num_steps=STEPS,
            local_learning_rate=LR,
        ),
        callbacks=[Watch()],
        send_metrics_to_platform=False,
    )
    assert work == [COHORT * STEPS] * (WARM_UP + given.rounds), work
    assert next(network.parameters()).device.type == given.device
    return clock.speed(work)


def find_peer(given: argparse.Namespace) -> None:
    os.environ["PFL_PYTORCH_DEVICE"] = given.device
    if given.peer_path:
        # Last, so that what is installed comes first.
        sys.path.append(os.path.abspath(given.peer_path))
    missing = {name.partition(".")[0] for name in UNUSED}
    missing = {name for name in missing if importlib.util.find_spec(name) is None}
    for name in UNUSED:
        above, _, own = name.rpartition(".")
        if name.partition(".")[0] in missing:
            sys.modules[name] = Stub(name)
            if above:
                setattr(sys.modules[above], own, sys.modules[name])


class Stub(types.ModuleType):
    """A module whose every name is an empty class: enough to be imported and never used."""

    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def copies(given: argparse.Namespace) -> float:
    """Add the speeds of several copies at once."""
    command = [sys.executable, __file__, "--device", given.device, "--rounds", str(given.rounds)]
    if given.peer_path:
        command += ["--peer-path", given.peer_path]
    threads = max(1, torch.get_num_threads() // given.processes)
    setting = os.environ | {"OMP_NUM_THREADS": str(threads)}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=setting)
        for _ in range(given.processes)
    ]
    answers = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    return sum(json.loads(answer.splitlines()[-1])["pfl"] for answer in answers)


def ours(given: argparse.Namespace, precision: str = "float32") -> float:
    """Time coterie's simulated rounds, with the clients that were really drawn."""
    from cnn import images
    from coterie.engine.simulate import Progress, simulate
    from coterie.methods.pmtl import PMTL
    from coterie.models import CNN
    from coterie.planning.plan import Plan, Privacy, Speed
    from coterie.privacy.entropy import open_entropy
    from coterie.privacy.sampling import FixedSize
    from coterie.solvers.sgd import SGD

    plan = Plan(
        method=PMTL(
            model=CNN(),
            solver="sgd",
            sgd=SGD(lr=LR, steps=STEPS, batch=BATCH),
            lam=LAM,
            last_solve=False,
        ),
        privacy=Privacy(noise_multiplier=NOISE, clip=CLIP, relation="replace"),
        sampler=FixedSize(COHORT),  # as pfl draws them
        rounds=OUR_WARM_UP[given.device] + OUR_ROUNDS[given.device] * given.rounds,
        simulation_seed=0,
    )
    clock = Clock(given.device, OUR_WARM_UP[given.device])

    def observe(progress: Progress) -> None:
        clock.end_round()

    speed = Speed(device=given.device, block=given.block, precision=precision)
    outcome = simulate(plan, images(), observe=observe, speed=speed)
    assert sum(leaf.numel() for leaf in outcome.shared.values()) == PARAMETERS
    coins = (open_entropy(plan.simulation_seed, "cohort", number) for number in range(plan.rounds))
    return clock.speed([STEPS * len(plan.sampler.draw(CLIENTS, each)) for each in coins])


def loop(given: argparse.Namespace) -> float:
    """Time the local steps alone, one client after the other."""
    import cnn
    from coterie.core.rng import Rng
    from coterie.core.tree import to
    from coterie.models import CNN

    shared = to(CNN().init(cnn.SPEC, Rng.seeded(0)), given.device)
    how = argparse.Namespace(device=given.device, rounds=given.rounds, block=COHORT)
    return cnn.measure(cnn.loop, cnn.images().to(given.device), shared, how)


def rows() -> tuple[Tensor, Tensor]:
    """Make the images of `cnn.images`, without coterie."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS * ROWS, 28, 28, generator=generator)
    return x, torch.randint(0, CLASSES, (CLIENTS * ROWS,), generator=generator)


class Clock:
    """The time of laps of some rounds: a GPU is not waited for inside a lap."""

    def __init__(self, device: str, warm_up: int = WARM_UP) -> None:
        self.device, self.warm_up, self.each, self.rounds = device, warm_up, LAP[device], 0
        self.stamps: list[float] = []

    def end_round(self) -> None:
        """Count a round; look at the time if it ends the warm-up or a lap."""
        self.rounds += 1
        if self.rounds >= self.warm_up and (self.rounds - self.warm_up) % self.each == 0:
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.stamps.append(time.perf_counter())

    def speed(self, work: list[int]) -> float:
        """Return the median speed of the laps, from the client-steps of every round."""
        assert len(work) == self.rounds, (len(work), self.rounds)
        laps = np.add.reduceat(
            work[self.warm_up :], range(0, self.rounds - self.warm_up, self.each)
        )
        return statistics.median(laps[: len(self.stamps) - 1] / np.diff(self.stamps))


def place(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads"


if __name__ == "__main__":
    main()
