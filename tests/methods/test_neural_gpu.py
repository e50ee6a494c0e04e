"""Neural methods on a GPU: the same models as on the CPU up to rounding, and the same guarantee."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.base import registered
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pmtl import PMTL
from coterie.models import MLP
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.solvers.sgd import SGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
NET = MLP(hidden=(6,), activation="tanh")
STEPS = SGD(lr=0.1, steps=4, batch=5)
METHODS = {
    "fedavg": FedAvg(model=NET, sgd=STEPS),
    "pmtl": PMTL(model=NET, sgd=STEPS),
    "clusters": PMTL(model=NET, sgd=STEPS, clusters=(0, 1) * 5),
    "dpfedmtl": DPFedMTL(model=NET, sgd=STEPS),
    "alternate": DPFedMTL(model=NET, sgd=STEPS, alternate=True),
    "ragged": DPFedMTL(model=NET, sgd=SGD(epochs=2)),
    "ditto": registered()["ditto"](model=NET, sgd=STEPS),
    "pfedme": registered()["pfedme"](model=NET, sgd=STEPS),
    "related": registered()["related"](model=NET, sgd=STEPS),
    "naive_dp": registered()["naive_dp"](model=NET, sgd=STEPS),
    **{
        f"{how} {base.kind}": Finetune(base=base, how=how, sgd=STEPS)
        for how in ("plain", "mean", "kl", "ewc")
        for base in (PMTL(model=NET, sgd=STEPS), DPFedMTL(model=NET, sgd=STEPS))
    },
}


@pytest.fixture(autouse=True)
def whole_numbers():
    """Products in full precision, so that both devices agree closely."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def dataset():
    return synthetic(
        "mean", clients=10, rows=(4, 12), features=5, task="multiclass", outputs=3, seed=0
    ).data


@pytest.mark.parametrize("lr", [1.0, 10.0])
def test_clients_that_diverge_are_reset_as_on_the_cpu(lr):
    data = synthetic("mean", clients=10, rows=(4, 12), features=5, seed=0).data
    data.features[data.offsets[2] : data.offsets[4]] *= 30.0  # steps on these rows are unstable
    plan = Plan(
        method=PMTL(model=NET, sgd=SGD(lr=lr, steps=8, batch=5), lam=0.1),
        privacy=Privacy(epsilon=math.inf),
        rounds=3,
        simulation_seed=0,
    )
    there, here = simulate(plan, data, speed=Speed(device="cuda")), simulate(plan, data)
    assert there.zeroed == here.zeroed
    for leaf, rows in here.models.leaves.items():
        assert rows.isfinite().all() and rows.abs().max() < 1e3
        torch.testing.assert_close(there.models.leaves[leaf].cpu(), rows, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("noise", ["gaussian", "local"])
@pytest.mark.parametrize("name", METHODS)
def test_both_devices_agree(name, noise):
    if noise == "local" and name == "naive_dp":
        pytest.skip("posts rows, which have noise of their own already")
    plan = Plan(
        method=METHODS[name],
        privacy=Privacy(noise_multiplier=0.3, noise=noise),
        rounds=3,
        simulation_seed=0,
    )
    there = simulate(plan, dataset(), speed=Speed(device="cuda"))
    here = simulate(plan, dataset())
    assert there.guarantee == here.guarantee and there.zeroed == here.zeroed == 0
    for leaf in here.models.leaves:
        torch.testing.assert_close(
            there.models.leaves[leaf].cpu(), here.models.leaves[leaf], rtol=2e-3, atol=2e-3
        )


def test_no_numbers_are_counted_there_too():
    data = dataset()
    features = data.features.clone()
    features[data.offsets[2]] = math.inf
    broken = replace(data, features=features)
    for method in (METHODS["fedavg"], METHODS["dpfedmtl"], METHODS["kl pmtl"]):
        plan = Plan(
            method=method, privacy=Privacy(noise_multiplier=0.3), rounds=3, simulation_seed=0
        )
        outcome = simulate(plan, broken, speed=Speed(device="cuda"))
        assert outcome.zeroed == 3
        assert all(leaf.isfinite().all() for leaf in outcome.models.leaves.values())


def test_mixed_precision_there():
    plan = Plan(
        method=METHODS["dpfedmtl"],
        privacy=Privacy(noise_multiplier=0.3),
        rounds=3,
        simulation_seed=0,
    )
    whole = simulate(plan, dataset(), speed=Speed(device="cuda"))
    mixed = simulate(plan, dataset(), speed=Speed(device="cuda", precision="bfloat16"))
    assert whole.guarantee == mixed.guarantee
    for name, leaf in whole.models.leaves.items():
        assert mixed.models.leaves[name].dtype == torch.float32
        torch.testing.assert_close(mixed.models.leaves[name], leaf, rtol=0.1, atol=0.1)


def test_finetuning_after_a_run_there():
    data = dataset()
    plan = Plan(
        method=METHODS["pmtl"], privacy=Privacy(noise_multiplier=0.3), rounds=2, simulation_seed=0
    )
    outcome = simulate(plan, data, speed=Speed(device="cuda"))
    tuned = outcome.finetune(Finetune(how="ewc", sgd=STEPS), data.to("cuda"))(np.arange(10))
    assert all(leaf.is_cuda and leaf.isfinite().all() for leaf in tuned.values())
