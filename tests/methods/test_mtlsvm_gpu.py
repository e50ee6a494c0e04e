"""MTL-SVM with rows on a GPU: it computes on the host, and gives the same models."""

import math

import numpy as np
import pytest
import torch

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.mocha import MOCHA
from coterie.methods.mtlsvm import MTLSVM
from coterie.methods.svm import GlobalSVM, LocalSVM
from coterie.planning.plan import Plan, Privacy, Speed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("task", ["binary", "regression", "multiclass"])
@pytest.mark.parametrize(
    "method", [MTLSVM(), MTLSVM(mask="paper"), LocalSVM(), GlobalSVM(), MOCHA()]
)
def test_the_device_is_a_matter_of_speed(task, method):
    data = synthetic("mean", clients=9, rows=(4, 20), features=6, task=task, seed=0).data
    for privacy in (Privacy(epsilon=math.inf), Privacy(epsilon=3.0)):
        if method.kind == "globalsvm" and privacy.epsilon != math.inf:
            continue
        plan = Plan(method=method, privacy=privacy, rounds=4, simulation_seed=1)
        host = simulate(plan, data)
        device = simulate(plan, data, speed=Speed(device="cuda"))
        for name, leaf in host.models.leaves.items():
            np.testing.assert_allclose(
                leaf.numpy(), device.models.leaves[name].cpu().numpy(), rtol=1e-5, atol=1e-6
            )
        if host.gap is not None:
            assert device.gap == pytest.approx(host.gap, rel=1e-6)
