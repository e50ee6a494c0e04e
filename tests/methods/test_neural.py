"""DPFedMTL and finetuning: against explicit loops over plain torch, closed forms, and bad input."""

import inspect
import math
import tomllib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.core.config import to_toml
from coterie.core.rng import Rng
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import check_onboard, simulate
from coterie.methods.base import registered
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pmtl import PMTL
from coterie.models import CNN, MLP, Linear, Module
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.sampling import Poisson
from coterie.solvers.sgd import SGD
from coterie.solvers.sgd_kernels import draw_batches

pytestmark = pytest.mark.full
BARE = Privacy(epsilon=math.inf)


def classes(clients=4, rows=(5, 9), features=6, outputs=3, seed=0):
    return synthetic(
        "mean",
        clients=clients,
        rows=rows,
        features=features,
        task="multiclass",
        outputs=outputs,
        spread=0.3,
        seed=seed,
    ).data


def rows_of(data, client):
    begin, end = data.offsets[client : client + 2]
    return data.features[begin:end], data.targets[begin:end]


def steps_by_hand(settings, params, x, y, rng, client, names):
    """Plain torch SGD of one client on some leaves, on the batches that the library draws."""
    counts = np.array([len(y)])
    batches = draw_batches(
        rng.keys(np.array([client])), counts, settings.count_steps(counts), settings.batch
    )[0]
    params = {name: leaf.clone() for name, leaf in params.items()}
    for batch in batches:
        rows = torch.from_numpy(batch[batch >= 0]).long()
        leaves = [params[name].requires_grad_() for name in names]
        hidden = torch.relu(x[rows] @ params["layer1.weight"].T + params["layer1.bias"])
        outputs = hidden @ params["head.weight"].T + params["head.bias"]
        grads = torch.autograd.grad(functional.cross_entropy(outputs, y[rows]), leaves)
        params = {name: leaf.detach() for name, leaf in params.items()}
        for name, grad in zip(names, grads, strict=True):
            params[name] = params[name] - settings.lr * grad
    return params


@pytest.mark.parametrize("alternate", [False, True])
def test_two_rounds_by_hand(alternate):
    data, sgd = classes(), SGD(lr=0.2, epochs=2, batch=4)
    method = DPFedMTL(
        model=MLP(hidden=(5,)), sgd=sgd, alternate=alternate, head_epochs=3, last_solve=False
    )
    plan = Plan(method=method, privacy=BARE, rounds=2, simulation_seed=3)
    outcome = simulate(plan, data)

    params = dict(method.model.init(data.spec, Rng.seeded(3).at("init")))
    body, top = ["layer1.weight", "layer1.bias"], ["head.weight", "head.bias"]
    shared = {name: params[name] for name in body}
    heads = [{name: params[name] for name in top} for _ in range(len(data))]
    for number in range(2):
        coins, changes = Rng.seeded(3).at("client", number), []
        for client in range(len(data)):
            x, y = rows_of(data, client)
            mine = {**shared, **heads[client]}
            if alternate:
                longer = replace(sgd, epochs=3)
                mine = steps_by_hand(longer, mine, x, y, coins.at("heads"), client, top)
            names = body if alternate else body + top
            after = steps_by_hand(sgd, mine, x, y, coins, client, names)
            heads[client] = {name: after[name] for name in top}
            changes.append({name: after[name] - shared[name] for name in body})
        for name in body:
            shared[name] = shared[name] + torch.stack([c[name] for c in changes]).mean(dim=0)
    for client in range(len(data)):
        model = outcome.model(client)
        for name, leaf in {**shared, **heads[client]}.items():
            torch.testing.assert_close(model[name], leaf, rtol=2e-4, atol=2e-5)


def test_heads_never_leave_and_the_last_fit_moves_heads_alone():
    data = classes()
    plan = Plan(
        method=DPFedMTL(model=MLP(hidden=(5,))),
        privacy=Privacy(epsilon=2.0),
        rounds=3,
        simulation_seed=0,
    )
    outcome = simulate(plan, data)
    assert all(set(post.value) == {"layer1.weight", "layer1.bias"} for post in outcome.posts)
    shared = outcome.shared
    for client in range(len(data)):
        assert torch.equal(outcome.model(client)["layer1.weight"], shared["layer1.weight"])
    heads = torch.stack([outcome.model(client)["head.weight"] for client in range(len(data))])
    assert all(not torch.equal(heads[0], other) for other in heads[1:])
    start = plan.method.model.init(data.spec, Rng.seeded(0).at("init"))
    assert torch.equal(shared["head.weight"], start["head.weight"])


def test_a_client_never_drawn_still_gets_a_head():
    data = classes(clients=6)
    method = DPFedMTL(model=MLP(hidden=(5,)))
    plan = Plan(method=method, privacy=BARE, sampler=Poisson(1.0), rounds=1, simulation_seed=1)
    outcome = simulate(plan, data)
    start = method.model.init(data.spec, Rng.seeded(1).at("init"))["head.weight"]
    assert all(not torch.equal(outcome.model(c)["head.weight"], start) for c in range(6))


@pytest.mark.parametrize(
    "settings,heads",
    [
        ({}, ("head.weight", "head.bias")),
        ({"personal": ("head",)}, ("head.weight", "head.bias")),
        ({"personal": ("layer2.bias", "head.weight")}, ("layer2.bias", "head.weight")),
        ({"personal": ("*.bias",)}, ("layer1.bias", "layer2.bias", "head.bias")),
        ({"head": "layer2"}, ("layer2.weight", "layer2.bias")),
        (
            {"encoder": "layer1"},
            ("layer2.weight", "layer2.bias", "head.weight", "head.bias"),
        ),
        (
            {"split": lambda name: name.endswith("bias")},
            ("layer1.bias", "layer2.bias", "head.bias"),
        ),
    ],
)
def test_splits(settings, heads):
    method = DPFedMTL(model=MLP(hidden=(5, 4)), **settings)
    spec = classes().spec
    assert method.heads(spec) == heads
    shared = method.init(spec, Rng.seeded(0))
    assert set(method.contribution(spec)) == set(method.model.init(spec, Rng.seeded(0))) - set(
        heads
    )
    assert set(method.init_client_state(shared, spec, 2)) == set(heads)


@pytest.mark.parametrize(
    "settings,told",
    [
        ({"model": Linear()}, "leaves nothing shared"),
        ({"split": lambda name: False}, "leaves nothing personal"),
        ({"personal": ("*",)}, "leaves nothing shared"),
        ({"personal": ("heads",)}, "'heads' names no leaf or layer of MLP: its leaves are layer1"),
        ({"head": "top"}, "'top' names no leaf"),
    ],
)
def test_bad_splits(settings, told):
    method = DPFedMTL(**({"model": MLP(hidden=(5,))} | settings))
    with pytest.raises(ValueError, match=told.replace("*", r"\*")):
        simulate(Plan(method=method, privacy=BARE, rounds=1), classes())


def test_bad_settings():
    with pytest.raises(ValueError, match="head and encoder were given"):
        DPFedMTL(head="a", encoder="b")
    with pytest.raises(ValueError, match="head_epochs = 0"):
        DPFedMTL(head_epochs=0)
    with pytest.raises(ValueError, match="lam = -1"):
        Finetune(lam=-1)


def is_bias(name):
    return name.endswith("bias")


def test_a_function_that_splits_is_named_in_the_plan():
    table = Plan(
        method=DPFedMTL(split=inspect.isclass), privacy=Privacy(epsilon=1.0), rounds=2
    ).to_table()
    assert table["method"]["split"] == "inspect:isclass"
    again = Plan.from_table(tomllib.loads(to_toml(table)))
    assert again.method.split is inspect.isclass
    table["method"]["split"] = "inspect:no_such_function"
    with pytest.raises(ValueError, match="define it by name in a module on the path"):
        Plan.from_table(table)


def test_the_papers_plan_claims_one_epsilon_and_has_another():
    plan = DPFedMTL.published(cohort=3, rounds=1000, sigma=9.69)
    guarantee = plan.guarantee(174)
    told = guarantee.statement()
    assert guarantee.claimed_epsilon == pytest.approx(math.sqrt(2 * math.log(1.25e5)) / 9.69)
    assert "NOT A GUARANTEE" in told and "0.5" in told
    # Each message is a clipped vector with noise of its own: mu = 2 C / (sigma S) = M / (K sigma).
    noise = plan.mechanisms(174)[0]
    assert 2 / noise.noise_multiplier == pytest.approx(174 / (3 * 9.69))
    assert guarantee.per_participation == pytest.approx(42.7, rel=1e-2)
    assert guarantee.views["server"] > 100
    data = classes(clients=12)
    outcome = simulate(DPFedMTL.published(cohort=3, rounds=2, sigma=2.42, model=MLP()), data)
    assert outcome.guarantee.claimed_epsilon == pytest.approx(2.0, rel=1e-2)
    assert outcome.guarantee.epsilon > 5 * outcome.guarantee.claimed_epsilon


def test_noise_of_clients_own_covers_the_server_and_costs_more():
    data = classes(clients=12)
    local = Plan(
        method=DPFedMTL(model=MLP(hidden=(5,))),
        privacy=Privacy(epsilon=3.0, noise="local"),
        sampler=Poisson(6.0),
        rounds=3,
        simulation_seed=0,
    )
    central = replace(local, privacy=Privacy(epsilon=3.0))
    ours, theirs = simulate(local, data), simulate(central, data)
    assert ours.guarantee.views["server"] <= 3.0 and ours.guarantee.per_participation <= 3.0
    assert theirs.guarantee.views["server"] == math.inf
    assert theirs.guarantee.views["server_secure_aggregation"] == math.inf
    noise = [plan.mechanisms(12)[0].noise_multiplier for plan in (local, central)]
    assert noise[0] > noise[1]
    for block in (1, 5):
        again = simulate(local, data, speed=Speed(block=block))
        for one, two in zip(again.posts, ours.posts, strict=True):
            for name in one.value:
                torch.testing.assert_close(one.value[name], two.value[name], rtol=1e-4, atol=1e-4)


# Finetuning


def regression(clients=5, seed=0):
    return synthetic(
        "mean", clients=clients, rows=(6, 12), features=3, noise=0.3, spread=1.0, seed=seed
    ).data


def design(data, client, model):
    x, y = rows_of(data, client)
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1) if model.bias else x
    return x.double(), y.double()


def flat(tree):
    return torch.cat([tree["weight"].flatten(), tree["bias"].flatten()]).double()


@cache
def finished(method):
    """Return a run that finetuning in several ways is compared with."""
    plan = Plan(method=method, privacy=Privacy(epsilon=20.0), rounds=2, simulation_seed=0)
    return simulate(plan, classes() if isinstance(method.model, MLP) else regression())


@pytest.mark.parametrize(
    ("base", "how"),
    # What a client starts from matters to ewc alone.
    [(FedAvg(), "plain"), (PMTL(lam=1.0), "mean"), (FedAvg(), "kl"), (PMTL(lam=1.0), "ewc")],
    ids=["fedavg-plain", "pmtl-mean", "fedavg-kl", "pmtl-ewc"],
)
def test_finetuning_of_least_squares_in_closed_form(base, how):
    """All four problems are quadratic for linear least squares; full batches, many steps."""
    data, lam = regression(), 0.7
    sgd = SGD(lr=0.3, epochs=1200 if how == "plain" else 500, batch=100)
    bare = finished(base)
    method = Finetune(base=base, how=how, lam=lam, sgd=sgd)
    outcome = simulate(replace(bare.plan, method=method), data)
    for one, two in zip(outcome.posts, bare.posts, strict=True):
        assert all(torch.equal(one.value[name], two.value[name]) for name in one.value)
    assert outcome.guarantee == bare.guarantee
    s = flat(outcome.shared)
    for client in range(len(data)):
        x, y = design(data, client, base.model)
        n, start = len(y), flat(bare.model(client))
        hessian, pull = x.T @ x / n, {
            "plain": torch.zeros(len(s), len(s), dtype=torch.float64),
            "mean": lam * torch.eye(len(s), dtype=torch.float64),
            "kl": lam * x.T @ x / n,
            "ewc": lam * torch.diag(((x @ start - y)[:, None] * x).square().mean(dim=0)),
        }[how]  # fmt: skip
        wanted = torch.linalg.solve(hessian + pull, x.T @ y / n + pull @ s)
        torch.testing.assert_close(flat(outcome.model(client)), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("how", ["mean", "kl", "ewc"])
def test_a_strong_pull_holds_and_none_is_plain(how):
    data = classes()
    bare = finished(FedAvg(model=MLP(hidden=(5,))))
    sgd = SGD(lr=0.01, epochs=100)

    def tuned(**settings):
        return bare.finetune(Finetune(sgd=sgd, **settings), data)(np.arange(len(data)))

    shared, plain = bare.models.leaves, tuned()
    loose, tight = tuned(how=how, lam=0.0), tuned(how=how, lam=50.0)
    moved = {name: (plain[name] - leaf).norm() for name, leaf in shared.items()}
    for name in shared:
        torch.testing.assert_close(loose[name], plain[name])
        if how != "ewc":  # coordinates of little information stay free, as they should
            assert (tight[name] - shared[name]).norm() < 0.7 * moved[name]
    total = sum((tight[name] - shared[name]).square().sum() for name in shared)
    assert total < 0.9 * sum(size**2 for size in moved.values())


@pytest.mark.parametrize("how", ["mean", "ewc"])
def test_heads_are_pulled_nowhere(how):
    data = classes()
    before = finished(DPFedMTL(model=MLP(hidden=(5,))))
    way = Finetune(how=how, sgd=SGD(lr=1e-3, epochs=1))
    free, held = (
        before.finetune(replace(way, lam=lam, model=None), data)(np.arange(len(data)))
        for lam in (0.0, 100.0)
    )
    start = before.models.leaves["head.weight"]
    assert (held["head.weight"] - start).norm() > 0.8 * (free["head.weight"] - start).norm()


def test_finetuning_needs_a_shared_model():
    data = regression()
    for base in (Local(), registered()["mpmtl"](), registered()["mtlsvm"]()):
        with pytest.raises(ValueError, match="has no shared model"):
            simulate(Plan(method=Finetune(base=base), privacy=BARE, rounds=1), data)


@pytest.mark.parametrize("how", ["plain", "mean", "kl", "ewc"])
def test_finetuning_a_finished_run_is_the_run_of_finetuning(how):
    data = classes()
    for base in (PMTL(model=MLP(hidden=(5,))), DPFedMTL(model=MLP(hidden=(5,)))):
        bare, method = finished(base), Finetune(base=base, how=how)
        later = bare.finetune(Finetune(how=how), data)(np.arange(len(data)))
        whole = simulate(replace(bare.plan, method=method), data).models.leaves
        for name in whole:
            torch.testing.assert_close(later[name], whole[name])


def test_in_clusters_the_mean_that_pulls_is_the_own_clusters():
    data, lam, places = regression(), 0.7, (0, 1, 0, 1, 1)
    base = PMTL(lam=1.0, clusters=places)
    method = Finetune(base=base, how="mean", lam=lam, sgd=SGD(lr=0.3, epochs=500, batch=100))
    plan = Plan(method=method, privacy=Privacy(epsilon=20.0), rounds=4, simulation_seed=0)
    outcome = simulate(plan, data)
    for client, place in enumerate(places):
        s = flat({name: leaf[place] for name, leaf in outcome.shared.items()})
        x, y = design(data, client, base.model)
        eye = lam * torch.eye(len(s), dtype=torch.float64)
        wanted = torch.linalg.solve(x.T @ x / len(y) + eye, x.T @ y / len(y) + eye @ s)
        torch.testing.assert_close(flat(outcome.model(client)), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "method,noise,numbers,expected",
    [
        (PMTL(), "gaussian", 4, 8.0),
        (PMTL(clusters=(0,) * 12 + (1,) * 4), "gaussian", 4, 8.0 / 4),
        (Finetune(base=PMTL(clusters=(0,) * 12 + (1,) * 4)), "gaussian", 4, 8.0 / 4),
        (DPFedMTL(model=MLP(hidden=(5,))), "gaussian", 20, 8.0),
        (PMTL(), "local", 4, math.sqrt(8.0)),
    ],
    ids=["all", "clusters", "finetuned", "layers", "local"],
)
def test_the_relative_error_is_that_of_the_smallest_mean(method, noise, numbers, expected):
    """sqrt(numbers) z over the clients expected in a mean; noise of each adds up by squares."""
    plan = Plan(
        method=method,
        privacy=Privacy(noise_multiplier=3.0, noise=noise),
        sampler=Poisson(8.0),
        rounds=2,
    )
    found = plan.relative_error(Spec((3,), 1, "regression", 16))
    assert found == pytest.approx(math.sqrt(numbers) * 3.0 / expected)
    bare = replace(plan, privacy=BARE)
    assert bare.relative_error(Spec((3,), 1, "regression", 16)) is None


def test_finetuning_is_of_the_clients_of_the_run():
    data = classes()
    plan = Plan(method=FedAvg(model=MLP()), privacy=BARE, rounds=1, simulation_seed=0)
    outcome = simulate(plan, data)
    for others in (data.only([3, 2, 1, 0]), data.only([0, 1])):
        with pytest.raises(ValueError, match="the same clients in the same order"):
            outcome.finetune(Finetune(), others)


# Broken clients


@pytest.mark.parametrize(
    "method",
    [FedAvg(model=MLP()), PMTL(model=MLP()), DPFedMTL(), Finetune(model=MLP()), PMTL(lam=1.0)],
    ids=["fedavg", "pmtl", "dpfedmtl", "finetune", "exact"],
)
def test_no_numbers_become_zero_are_counted_and_the_run_goes_on(method):
    data = regression(clients=6)
    features = data.features.clone()
    features[data.offsets[2]] = math.inf
    broken = replace(data, features=features)
    plan = Plan(method=method, privacy=Privacy(noise_multiplier=0.5), rounds=3, simulation_seed=0)
    outcome = simulate(plan, broken)
    assert outcome.zeroed == 3
    assert simulate(plan, data).zeroed == 0
    for client in range(6):
        assert all(leaf.isfinite().all() for leaf in outcome.model(client).values()), client
    counts = np.where(np.arange(6) == 2, 0, data.counts)
    kept = np.repeat(np.arange(6), data.counts) != 2
    absent = replace(
        data,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        features=data.features[torch.from_numpy(kept)],
        targets=data.targets[torch.from_numpy(kept)],
    )
    # A client without rows contributes zero where it starts from the shared model.
    if isinstance(method, FedAvg | DPFedMTL | Finetune):
        silent = simulate(plan, absent)
        for one, two in zip(outcome.posts, silent.posts, strict=True):
            for name in one.value:
                torch.testing.assert_close(one.value[name], two.value[name])
    assert outcome.guarantee == simulate(plan, data).guarantee


class Scaled(nn.Module):
    """A parameter without axes, and a layer that the output does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.idle = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(model=Scaled),
        PMTL(model=Scaled),
        DPFedMTL(model=Scaled, head="idle"),
        DPFedMTL(model=Scaled, head="idle", alternate=True),
        Finetune(model=Scaled, how="ewc"),
    ],
)
def test_parameters_without_axes_and_layers_without_use(method):
    data = regression()
    plan = Plan(method=method, privacy=Privacy(epsilon=3.0), rounds=2, simulation_seed=0)
    outcome = simulate(plan, data)
    assert all(leaf.isfinite().all() for leaf in outcome.model(0).values())


def no_number_for_large(outputs, targets):
    """A loss that is no number for some rows, with a gradient that is one."""
    return (outputs - targets).square() + torch.where(targets > 50, torch.nan, 0.0)


def test_a_loss_that_is_no_number_counts_even_where_its_gradient_is_one():
    data = regression(clients=6)
    targets = data.targets.clone()
    targets[data.offsets[2]] = 60.0
    model = Module(make=Scaled, loss=no_number_for_large)
    plan = Plan(
        method=FedAvg(model=model, sgd=SGD(lr=1e-4)),
        privacy=Privacy(epsilon=3.0),
        rounds=3,
        simulation_seed=0,
    )
    assert simulate(plan, replace(data, targets=targets)).zeroed == 3
    assert simulate(plan, data).zeroed == 0


def test_the_count_of_no_numbers_survives_a_stop(tmp_path):
    data = regression(clients=6)
    features = data.features.clone()
    features[data.offsets[2]] = math.inf
    broken = replace(data, features=features)
    plan = Plan(
        method=FedAvg(model=MLP()), privacy=Privacy(epsilon=3.0), rounds=5, simulation_seed=0
    )

    def stop(progress):
        if progress.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(plan, broken, observe=stop, folder=tmp_path)
    assert simulate(plan, broken, folder=tmp_path).zeroed == 5


@pytest.mark.parametrize(
    "method",
    [
        PMTL(clusters=(0, 0, 0, 1, 1)),
        Finetune(base=PMTL(clusters=(0, 0, 0, 1, 1))),
        registered()["related"](omega=tuple(tuple(row) for row in (np.eye(5) * 2 - 0.3).tolist())),
    ],
    ids=["clusters", "finetuned", "related"],
)
def test_newcomers_have_no_place_in_clusters_even_if_as_many(method):
    data = regression()
    outcome = simulate(Plan(method=method, privacy=BARE, rounds=1, simulation_seed=0), data)
    with pytest.raises(ValueError, match="fixed membership"):
        outcome.onboard(regression(seed=1))
    with pytest.raises(ValueError, match="fixed membership"):
        check_onboard(method)


def test_bad_ways_and_splits_are_refused():
    with pytest.raises(ValueError, match="how = 'foo': expected one of plain, mean, kl, ewc"):
        Finetune(how="foo")
    with pytest.raises(ValueError, match="expected a function of a leaf's name"):
        DPFedMTL(split="head")
    assert DPFedMTL(personal="head") == DPFedMTL(personal=("head",))


def test_a_client_without_rows_takes_part_and_keeps_the_start():
    data = classes(clients=4)
    counts = np.array([0, *data.counts[1:]])
    kept = torch.from_numpy(np.repeat(np.arange(4), data.counts) > 0)
    data = replace(
        data,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        features=data.features[kept],
        targets=data.targets[kept],
    )
    for method in (DPFedMTL(), Finetune(base=PMTL(model=MLP()), how="ewc")):
        plan = Plan(method=method, privacy=Privacy(epsilon=1.0), rounds=2, simulation_seed=0)
        outcome = simulate(plan, data)
        assert outcome.zeroed == 0
        assert all(leaf.isfinite().all() for leaf in outcome.model(0).values())


def test_precision_is_a_matter_of_speed():
    data = classes()
    images = FederatedDataset(
        Spec((2, 3), 3, "multiclass", len(data)),
        data.names,
        data.offsets,
        data.features.reshape(-1, 2, 3),
        data.targets,
    )
    small = CNN(channels=(3,), kernel=2, pool=1, hidden=(4,))
    for model, shaped in ((MLP(), data), (small, images)):
        plan = Plan(
            method=DPFedMTL(model=model), privacy=Privacy(epsilon=1.0), rounds=2, simulation_seed=0
        )
        whole = simulate(plan, shaped)
        mixed = simulate(plan, shaped, speed=Speed(precision="bfloat16"))
        assert whole.guarantee == mixed.guarantee
        for name, leaf in whole.models.leaves.items():
            assert mixed.models.leaves[name].dtype == torch.float32
            torch.testing.assert_close(mixed.models.leaves[name], leaf, rtol=0.05, atol=0.05)


def test_published_noise_of_every_step_is_that_of_the_sum_of_the_steps():
    """Where gradients vanish, H steps of noise move the shared layers by eta sqrt(H) sigma S."""
    data = classes(clients=40)
    lr, steps = 1e-6, 9
    plan = DPFedMTL.published(
        cohort=40, rounds=1, sigma=2.0, every_step=40, model=MLP(hidden=(5,)),
        sgd=SGD(lr=lr, steps=steps),
    )  # fmt: skip
    method = plan.method
    assert method.step_noise == pytest.approx(2.0 * 2 * 1.0 * 40 / 40)
    spec, stream = data.spec, Rng.seeded(0)
    shared = method.init(spec, stream)
    clients = data.clients(np.arange(40))
    personal = method.init_client_state(shared, spec, 40)
    _, change = method.local_update(shared, personal, clients, stream, 0)
    moved = torch.cat([leaf.flatten(1) for leaf in change.values()], dim=1).double()
    expected = lr * math.sqrt(steps) * method.step_noise
    # 40 clients x about 50 numbers: the ratio of deviations is 1 within 4 / sqrt(2 n)
    assert float(moved.std()) / expected == pytest.approx(1.0, abs=4 / math.sqrt(2 * moved.numel()))
    # Noise of one client does not depend on its company.
    alone = data.clients(np.array([7]))
    _, own = method.local_update(
        shared, method.init_client_state(shared, spec, 1), alone, stream, 0
    )
    for name, leaf in own.items():
        torch.testing.assert_close(leaf[0], change[name][7], rtol=1e-4, atol=1e-9)
    assert simulate(plan, data).guarantee.epsilon == math.inf
    with pytest.raises(ValueError, match=r"give sgd\.steps"):
        DPFedMTL(step_noise=1.0)


def test_published_noise_of_fedavg_falls_on_the_whole_model():
    data = classes(clients=30)
    method = FedAvg(model=MLP(hidden=(5,)), sgd=SGD(lr=1e-6, steps=4), step_noise=3.0)
    stream = Rng.seeded(1)
    shared, clients = method.init(data.spec, stream), data.clients(np.arange(30))
    _, change = method.local_update(shared, {}, clients, stream, 0)
    moved = torch.cat([leaf.flatten() for leaf in change.values()]).double()
    close = 4 / math.sqrt(2 * len(moved))
    assert float(moved.std()) / (1e-6 * math.sqrt(4) * 3.0) == pytest.approx(1.0, abs=close)
    assert change.keys() == shared.keys()
    with pytest.raises(ValueError, match=r"give sgd\.steps"):
        FedAvg(step_noise=1.0)


def test_heads_that_grow_a_little_in_every_round_do_not_diverge():
    """A round's check allows a head to grow to twice its size: over 60 rounds beyond all limits."""
    data = regression(clients=8)
    plan = Plan(method=DPFedMTL(), privacy=Privacy(epsilon=8.0), rounds=60, simulation_seed=0)
    found = simulate(plan, data).rows(np.arange(8))
    sizes = torch.stack([leaf.flatten(1).norm(dim=1) for leaf in found.values()]).norm(dim=0)
    assert float(sizes.max()) < 1000


def test_a_network_that_diverged_over_the_rounds_is_the_shared_one_again():
    data, method = regression(clients=3), PMTL(model=MLP(hidden=(8,)), sgd=SGD(lr=1e-6))
    clients, shared = data.clients(np.arange(3)), method.init(data.spec, Rng.seeded(0))
    personal = method.init_client_state(shared, data.spec, 3)
    personal = {name: leaf.clone() for name, leaf in personal.items()}
    for leaf in personal.values():
        leaf[1] *= 1e12
    found = method.personalise(shared, personal, clients, Rng.seeded(1))
    after, _ = method.local_update(shared, personal, clients, Rng.seeded(1), 0)
    for models in (found, after):
        for name, leaf in shared.items():
            assert torch.equal(models[name][1], leaf)
            assert torch.allclose(models[name][0], leaf, atol=1e-3)
