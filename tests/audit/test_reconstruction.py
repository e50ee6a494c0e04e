"""What a curious server reconstructs: rows that are known exactly, and what hides them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from coterie.audit.reconstruction import (
    Known,
    Matching,
    draw_starts,
    one_row,
    reconstruct,
    score,
)
from coterie.core.rng import Rng
from coterie.data.federated import Spec
from coterie.data.synthetic import synthetic
from coterie.methods.base import registered
from coterie.models import CNN, MLP, Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.sampling import Poisson
from coterie.solvers.sgd import SGD

pytestmark = pytest.mark.full

KINDS = ["ditto", "dpfedmtl", "fedavg", "finetune", "naive_dp", "pfeb", "pfedme", "pmtl", "ppsgd"]


def federation(rows, task="regression", features=6, clients=12, **options):
    return synthetic(
        "mean", clients=clients, rows=rows, features=features, task=task, seed=1, **options
    ).data


def attacked(data, kind="pmtl", *, epsilon=1.0, clients=2, steps=100, rounds=2, **settings):
    privacy = settings.pop("privacy", Privacy(epsilon=epsilon))
    sampler = settings.pop("sampler", Poisson())
    method = registered()[kind](**settings)
    plan = Plan(method=method, privacy=privacy, rounds=rounds, sampler=sampler)
    found = reconstruct(plan, data, clients=clients, steps=steps)
    return found, {one.name: one for one in found.settings}


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_is_read_off_a_contribution(kind):
    """The change of a dense first layer is a multiple of (x, 1), for any solver and any clip."""
    model = MLP(hidden=(5,)) if kind == "dpfedmtl" else Linear()
    found, settings = attacked(
        federation(1), kind, model=model, privacy=Privacy(epsilon=1.0, clip=0.01)
    )
    assert found.closed_form and found.rows == (1, 1)
    assert max(map(np.max, settings["trusted"].errors)) < 1e-3 and settings["trusted"].found == 1
    hidden = settings["secure_aggregation"]
    if kind == "naive_dp":  # it releases a row per client: a sum hides nothing
        assert hidden.found == 1 and "client_noise" not in settings
    else:
        assert hidden.found == 0 and hidden.error > 0.5 and hidden.clients == 12


def test_noise_of_clients_hides_the_row_at_any_useful_epsilon():
    _, settings = attacked(federation(1), "pmtl", clients=10)
    noisy = settings["client_noise"]
    assert noisy.noise > 1 and noisy.found == 0 and noisy.error > settings["guess"].error > 0.5
    _, settings = attacked(federation(1), "pmtl", clients=10, epsilon=1e4)
    assert settings["client_noise"].error < 0.05  # the test above can fail


def test_a_plan_with_local_noise_is_compared_with_a_trusted_server():
    privacy = Privacy(epsilon=1.0, noise="local")
    central, local = (
        attacked(federation(1), privacy=one)[1] for one in (Privacy(epsilon=1.0), privacy)
    )
    for name, one in central.items():
        np.testing.assert_allclose(local[name].errors, one.errors)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_one_row_of_an_mlp_is_read_off_after_many_steps(task):
    data = federation(1, task, outputs=3 if task == "multiclass" else None)
    _, settings = attacked(data, "fedavg", model=MLP(hidden=(8,)), sgd=SGD(steps=7))
    assert settings["trusted"].error < 1e-3
    assert settings["secure_aggregation"].found == 0 == settings["client_noise"].found


def test_few_rows_of_an_mlp_are_found_by_matching_gradients():
    found, settings = attacked(
        federation(3), model=MLP(hidden=(48,)), clients=1, steps=250, epsilon=math.inf
    )
    assert not found.closed_form and found.local_steps == 1
    assert settings["trusted"].error < 0.1 and settings["secure_aggregation"].error > 0.5
    assert "no budget" in found.left_out and "client_noise" not in settings


def test_an_image_is_found_by_matching_gradients_and_its_class_inferred():
    data = federation(1, "multiclass", features=36, outputs=4)
    data = replace(
        data, features=data.features.reshape(-1, 6, 6), spec=replace(data.spec, shape=(6, 6))
    )
    model = CNN(channels=(12,), kernel=3, padding=1)
    found, settings = attacked(data, "pmtl", model=model, clients=1, steps=200, epsilon=math.inf)
    assert not found.closed_form and settings["trusted"].error < 0.1
    assert settings["secure_aggregation"].error > 0.5


def test_a_linear_model_reveals_a_direction_of_many_rows_and_not_the_rows():
    found, settings = attacked(federation(8), "fedavg", sgd=SGD(epochs=2), steps=60)
    trusted = settings["trusted"]
    assert found.local_steps == 2 and trusted.found < 0.2 and trusted.error > 0.5
    assert all(0 <= one <= 1 for one in (*trusted.cosines, *trusted.mean_cosines))


def test_without_a_bias_only_the_direction_is_found():
    _, settings = attacked(federation(1), "fedavg", model=Linear(bias=False))
    assert settings["trusted"].error < 1e-3  # at its best scale
    row = np.array([[3.0, -4.0]])
    found = one_row(torch.tensor(-2.0 * row), None)
    np.testing.assert_allclose(np.abs(found), [[0.6, 0.8]])


def test_mtlsvm_is_attacked_by_its_messages():
    data = federation(1, "binary", clients=60)
    found, settings = attacked(data, "mtlsvm", rounds=4, clients=6)
    assert found.rounds == 4 and settings["trusted"].error < 1e-3
    assert settings["secure_aggregation"].error > 0.5 < settings["client_noise"].error
    direction = attacked(data, "mtlsvm", model=Linear(bias=False))[1]
    assert direction["trusted"].error < 1e-3


def test_clients_with_the_fewest_rows_are_attacked():
    data = federation((1, 4))
    found, _ = attacked(data, clients=3, steps=2)
    assert found.rows == tuple(sorted(data.counts.tolist())[:3])


def test_rows_are_matched_one_to_one_and_a_guess_has_error_1():
    rng = np.random.default_rng(0)
    true = rng.standard_normal((4, 3))
    known = Known(np.zeros(3), float((true**2).sum(axis=1).mean()))
    errors, best, _ = score(true[[2, 0, 3, 1]] + 1e-9, true, known)
    assert errors.max() < 1e-12 and best == pytest.approx(1)
    assert score(np.zeros((0, 3)), true, known)[0].mean() == pytest.approx(1)
    half = score(true[:2], true, known)[0]
    assert (half[:2] == 0).all() and (half[2:] > 0).all()
    assert score(np.full((1, 3), np.nan), true[:1], known)[0] == 1e12


def test_units_that_are_active_for_one_row_are_a_start():
    known = Known(np.zeros(2), 2.0)
    weight, bias = (
        torch.tensor([[2.0, 0.0], [0.0, -3.0], [900.0, 0.0]]),
        torch.tensor([2.0, 3.0, 1.0]),
    )
    starts = draw_starts(known, 2, weight, bias, Rng.seeded(0))
    assert {tuple(row) for row in starts[-1].tolist()} == {(1.0, 0.0), (0.0, -1.0)}


def test_the_attack_is_the_same_with_the_same_seed():
    first, second = (attacked(federation(2), steps=20)[0] for _ in range(2))
    drop = lambda found: {**found.to_json(), "seconds": 0}  # noqa: E731
    assert drop(first) == drop(second)


def test_sampled_cohorts_contain_the_attacked_clients():
    _, settings = attacked(federation(1), sampler=Poisson(2))
    assert 2 <= settings["secure_aggregation"].clients < 12


@pytest.mark.parametrize("kind", ["mpmtl", "dpaggr", "local", "related", "dpmtrl"])
def test_methods_without_an_attack_are_named(kind):
    with pytest.raises(ValueError, match=f"no reconstruction attack for {kind}.*fedavg"):
        attacked(federation(1), kind)


def test_settings_without_an_attack_are_refused():
    with pytest.raises(ValueError, match="change of a whole model"):
        attacked(federation(1), shared="slice", directions=2)
    with pytest.raises(ValueError, match="change of a whole model"):
        attacked(federation(1), "pfeb", shared="slice", directions=2)
    with pytest.raises(ValueError, match="at least one client"):
        attacked(federation(1), clients=0)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.table((x > 0).long()).mean(dim=1))


def test_models_that_look_rows_up_have_no_gradient():
    with pytest.raises(ValueError, match="looks rows up"):
        attacked(federation(1), "fedavg", model=Lookup)


def test_the_update_of_true_rows_has_no_loss():
    """The gradient of the search is that of the local step of a client."""
    data = federation(2)
    rows, targets = data.features[:2].double().numpy(), data.targets[:2]
    model, spec = MLP(hidden=(4,)), Spec((6,), 1, "regression", 12)
    start = {name: leaf.requires_grad_() for name, leaf in model.init(spec, Rng.seeded(0)).items()}
    loss = model.losses("regression", model.apply(start, data.features[:2]), targets).mean()
    slopes = torch.autograd.grad(loss, list(start.values()))
    update = {name: -0.3 * slope for name, slope in zip(start, slopes, strict=True)}
    start = {name: leaf.detach() for name, leaf in start.items()}
    known = Known(rows.mean(axis=0), 1.0)
    problem = Matching(model, spec, start, update, targets, known)
    x = torch.from_numpy(rows)[None].float().requires_grad_()
    losses = problem._losses(x, torch.zeros_like(x)).detach()
    assert losses.tolist() == pytest.approx([0], abs=1e-6)
