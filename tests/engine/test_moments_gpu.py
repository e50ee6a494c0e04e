"""Second moments, and the methods that post them, on a GPU as on the CPU."""

import numpy as np
import pytest
import torch

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.baselines import Single
from coterie.methods.dpaggr import DPAggr
from coterie.methods.dpmtrl import DPMTRL
from coterie.methods.mpmtl import MPMTL
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.mechanisms import GaussianRows, GaussianSum
from coterie.privacy.moments import GaussianGram, Squares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
METHODS = [
    MPMTL(), MPMTL(structure="group_sparse"), MPMTL(solver="steps", clip_own=True),
    MPMTL(decompose=0.05), Single(), DPAggr(), DPMTRL(),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("task", ["regression", "binary"])
def test_a_run_on_the_gpu_is_the_run_on_the_cpu(method, task):
    data = synthetic("low_rank", clients=40, rows=(3, 30), features=8, task=task, seed=0).data
    plan = Plan(method=method, privacy=Privacy(epsilon=2.0), rounds=3, simulation_seed=1)
    here = simulate(plan, data).models.leaves
    there = simulate(plan, data, speed=Speed(device="cuda")).models.leaves
    for name in here:
        torch.testing.assert_close(here[name], there[name].cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mechanism",
    [GaussianGram(0.7, 1.0), Squares(GaussianSum(0.5, 1.0)), GaussianRows(0.7, 1.0, 50)],
    ids=repr,
)
def test_sums_are_exact_on_the_gpu(mechanism):
    rows = {"w": torch.randn(50, 12, dtype=torch.float64) * 3}
    rows["w"][3, 0], rows["w"][4] = torch.nan, 1e200
    ids = torch.from_numpy(np.random.default_rng(0).permutation(50))
    clipped, _ = mechanism.clip(rows)
    there, _ = mechanism.clip({"w": rows["w"].cuda()})
    left = mechanism.reduce(clipped, ids)["w"]
    right = mechanism.reduce({"w": there["w"]}, ids)["w"].cpu()
    assert float((left - right).abs().max()) <= 1e-3  # a rounding may fall on the other side
    exact = mechanism.reduce({"w": clipped["w"].cuda()}, ids)["w"].cpu()
    assert torch.equal(left, exact)
