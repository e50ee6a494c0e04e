"""Contracts that every registered method keeps. The privacy contracts have no exceptions.

Privacy: purity, init from public facts, row independence (bitwise), replay from posts and own data,
declared shape. Utility (a method may declare one not applicable, with a reason): learns.
"""

import math
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.core.config import to_toml
from coterie.core.rng import Rng
from coterie.data.synthetic import synthetic
from coterie.engine.rounds import RoundState, client_half
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.base import Shape, about, per_row_leaves, registered
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.models import MLP, Linear
from coterie.plan.plan import Plan, Privacy, Speed
from coterie.privacy.sampling import Poisson

# Settings that change what a method computes are held to the contracts like methods of their own.
VARIANTS = {
    "finetune mean pmtl": ("finetune", {"base": PMTL(), "how": "mean"}),
    "finetune kl": ("finetune", {"base": FedAvg(prox=0.1), "how": "kl"}),
    "finetune ewc pmtl": ("finetune", {"base": PMTL(), "how": "ewc"}),
    "finetune mean dpfedmtl": ("finetune", {"base": DPFedMTL(), "how": "mean"}),
    "finetune kl dpfedmtl": ("finetune", {"base": DPFedMTL(), "how": "kl"}),
    "finetune ewc dpfedmtl": ("finetune", {"base": DPFedMTL(), "how": "ewc"}),
    "dpfedmtl alternate": ("dpfedmtl", {"alternate": True, "head_epochs": 2}),
    "dpfedmtl encoder": ("dpfedmtl", {"encoder": "head", "last_solve": False}),
    "ditto sgd": ("ditto", {"solver": "sgd"}),
    "pfedme sgd": ("pfedme", {"solver": "sgd", "local_rounds": 2, "beta": 1.5}),
    "ppsgd ridge": ("ppsgd", {"share": 0.3, "ridge": 0.1}),
    "related start sgd": ("related", {"change_from": "start", "solver": "sgd"}),
    "mpmtl group_sparse": ("mpmtl", {"structure": "group_sparse"}),
    "mpmtl steps": ("mpmtl", {"solver": "steps", "lam": 0.05}),
    "mpmtl steps strong group_sparse clip_own": (
        "mpmtl",
        {
            "solver": "steps",
            "structure": "group_sparse",
            "acceleration": "strong",
            "mu": 0.01,
            "clip_own": True,
        },
    ),
    "mpmtl absolute lift add": (
        "mpmtl",
        {"lam": 0.1, "lam_scale": "absolute", "lift": "add"},
    ),
    "mtlsvm mask step": ("mtlsvm", {"mask": "step", "gamma": "average"}),
    "mtlsvm mask paper": ("mtlsvm", {"mask": "paper", "epochs": 1, "last_solve": False}),
    "mtlsvm between": ("mtlsvm", {"gamma": 0.5, "epochs": 3}),
    "mocha learned": ("mocha", {"relation": "learned", "every": 2}),
    "pfeb gls": ("pfeb", {"gls": True}),
    "pfeb fixed": ("pfeb", {"learn": False, "momentum": 0.0}),
    "pfeb guard": ("pfeb", {"guard": True}),
    "pfeb slice": ("pfeb", {"shared": "slice", "directions": 2}),
    "pmtl slice": ("pmtl", {"shared": "slice", "directions": 2}),
    "mpmtl decompose": ("mpmtl", {"decompose": 0.02}),
    "mpmtl steps decompose column": (
        "mpmtl",
        {"solver": "steps", "decompose": 0.02, "decompose_by": "column"},
    ),
}
POOLED = sorted(n for n, kind in registered().items() if kind().shape is Shape.POOLED)
METHODS = sorted(set(registered()) - set(POOLED)) + sorted(VARIANTS)
CASES = [
    ("regression", Linear()),
    ("binary", Linear()),
    ("multiclass", Linear()),
    ("regression", MLP(hidden=(4,))),
]


def build(name, **settings):
    kind, chosen = VARIANTS.get(name, (name, {}))
    return registered()[kind](**chosen, **settings)


def toy(task, clients=6, seed=0):
    return synthetic(
        "mean", clients=clients, rows=(3, 9), features=4, task=task, spread=0.3, seed=seed
    ).data


def make(name, model, task="regression"):
    return build(name, model=model)


def refusal(name, task, model):
    """What a method says to a task and a model that it cannot work on; None if it can."""
    try:
        make(name, model).check(toy(task).spec)
    except ValueError as error:
        return str(error)
    return None


ALL = [(name, task, model) for name in METHODS for task, model in CASES]
TAKEN = [case for case in ALL if refusal(*case) is None]
REFUSED = [case for case in ALL if case not in TAKEN]


def marks(name):
    """Variants are not part of the daily subset."""
    return pytest.mark.full if name in VARIANTS else ()


every_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in METHODS]
)
every_case = pytest.mark.parametrize(
    "name,task,model",
    [pytest.param(*case, marks=marks(case[0])) for case in TAKEN],
    ids=[f"{n}-{t}-{type(m).__name__}" for n, t, m in TAKEN],
)


def test_refusals_say_what_is_wrong_and_what_to_use():
    for name, task, model in REFUSED:
        told = refusal(name, task, model)
        assert "use " in told and (task in told or type(model).__name__ in told), told


def test_no_method_refuses_everything():
    for name in METHODS:
        build(name).check(toy("regression").spec)


@pytest.mark.parametrize("name", POOLED)
def test_pooled_methods_are_never_private(name):
    method, data = registered()[name](), toy("regression")
    with pytest.raises(ValueError, match="not private"):
        Plan(method=method, privacy=Privacy(epsilon=5.0)).guarantee(6)
    with pytest.raises(ValueError, match="not private"):
        Plan(method=method, privacy=Privacy(noise_multiplier=5.0)).guarantee(6)
    outcome = simulate(Plan(method=method, privacy=Privacy(epsilon=math.inf), rounds=3), data)
    assert outcome.guarantee.epsilon == math.inf
    assert outcome.billboard.ledger.charged == {0}
    first = method.model.init(data.spec, Rng.seeded(0))
    shapes = {k: v.shape for k, v in outcome.model(0).items()}
    assert shapes == {k: v.shape for k, v in first.items()}


def state_of(method, data):
    shared = method.init(data.spec, Rng.seeded(0))
    shared = {k: v + 0.1 for k, v in shared.items()}
    personal = method.init_client_state(shared, data.spec, data.spec.clients)
    for name in per_row_leaves(personal):
        # Entries for more rows than any client has here, as a store hands them out beside others.
        shape = (len(data), 32, *personal[name].shape[2:])
        personal = {**personal, name: personal[name].new_zeros(shape)}
    return shared, {k: v + 0.05 for k, v in personal.items()}


def update(method, data, shared, personal, ids):
    block = data.clients(np.asarray(ids, dtype=np.int64))
    rows = {k: v[torch.as_tensor(ids)] for k, v in personal.items()}
    after, sent = method.local_update(shared, rows, block, Rng.seeded(1), 0)
    final = method.personalise(shared, after, block, Rng.seeded(2))
    return after, sent, final


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[k], right[k]) for k in left)


def close(left, right, tolerance=2e-5):
    assert left.keys() == right.keys()
    for k in left:
        torch.testing.assert_close(left[k], right[k], rtol=tolerance, atol=tolerance)


@every_case
def test_pure(name, task, model):
    method, data = make(name, model, task), toy(task)
    shared, personal = state_of(method, data)
    before = [{k: v.clone() for k, v in tree.items()} for tree in (shared, personal)]
    features, targets = data.features.clone(), data.targets.clone()
    first = update(method, data, shared, personal, range(6))
    second = update(method, data, shared, personal, range(6))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert same(shared, before[0]) and same(personal, before[1])
    assert torch.equal(features, data.features) and torch.equal(targets, data.targets)


@every_case
def test_row_independence(name, task, model):
    """Change everything about one client: no other client may move by a bit."""
    method, data = make(name, model, task), toy(task)
    shared, personal = state_of(method, data)
    features, targets = data.features.clone(), data.targets.clone()
    start, stop = data.offsets[2], data.offsets[3]
    features[start:stop] = features[start:stop].abs() * -3 + 1
    targets[start:stop] = 0 if task == "multiclass" else 1 - targets[start:stop]
    other = replace(data, features=features, targets=targets)
    moved = {k: v.clone() for k, v in personal.items()}
    for leaf in moved.values():
        leaf[2] += 1
    ours = update(method, data, shared, personal, range(6))
    theirs = update(method, other, shared, moved, range(6))
    rest = torch.tensor([0, 1, 3, 4, 5])
    for mine, his in zip(ours, theirs, strict=True):
        assert same({k: v[rest] for k, v in mine.items()}, {k: v[rest] for k, v in his.items()})
    if method.shape is not Shape.NONE:
        assert not same(ours[1], theirs[1]), "the changed client must matter to itself"


@every_case
@pytest.mark.parametrize("rows", [1, 30])
def test_how_many_rows_a_client_has_is_nobody_elses_business(name, task, model, rows):
    """Return one client fewer or more rows, far from the origin: no other may move by a bit."""
    method, data = make(name, model, task), toy(task)
    data = replace(data, features=data.features + 100)
    shared, personal = state_of(method, data)
    owner = np.repeat(np.arange(6), data.counts)
    picked = np.resize(np.flatnonzero(owner == 2), rows)
    index = torch.from_numpy(
        np.concatenate([np.flatnonzero(owner < 2), picked, np.flatnonzero(owner > 2)])
    )
    counts = data.counts.copy()
    counts[2] = rows
    other = replace(
        data,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        features=data.features[index],
        targets=data.targets[index],
    )
    ours = update(method, data, shared, personal, range(6))
    theirs = update(method, other, shared, personal, range(6))
    rest = torch.tensor([0, 1, 3, 4, 5])
    for mine, his in zip(ours, theirs, strict=True):
        if isinstance(model, Linear):
            assert same({k: v[rest] for k, v in mine.items()}, {k: v[rest] for k, v in his.items()})
        else:
            close({k: v[rest] for k, v in mine.items()}, {k: v[rest] for k, v in his.items()})


@every_case
def test_a_broken_client_spoils_nobody_else(name, task, model):
    method, data = make(name, model, task), toy(task)
    shared, personal = state_of(method, data)
    features = data.features.clone()
    features[data.offsets[4]] = math.nan
    broken = replace(data, features=features)
    ours = update(method, data, shared, personal, range(6))
    theirs = update(method, broken, shared, personal, range(6))
    rest = torch.tensor([0, 1, 2, 3, 5])
    for mine, his in zip(ours, theirs, strict=True):
        assert same({k: v[rest] for k, v in mine.items()}, {k: v[rest] for k, v in his.items()})


@every_case
def test_order_and_stack_size_do_not_matter(name, task, model):
    method, data = make(name, model, task), toy(task)
    shared, personal = state_of(method, data)
    whole = update(method, data, shared, personal, range(6))
    order = [3, 0, 5, 1, 4, 2]
    shuffled = update(method, data, shared, personal, order)
    for mine, his in zip(whole, shuffled, strict=True):
        close({k: v[torch.tensor(order)] for k, v in mine.items()}, his)
    for client in range(6):
        alone = update(method, data, shared, personal, [client])
        for mine, his in zip(whole, alone, strict=True):
            close({k: v[client : client + 1] for k, v in mine.items()}, his)


@every_case
def test_declared_shape_and_template(name, task, model):
    method, data = make(name, model, task), toy(task)
    shared, personal = state_of(method, data)
    after, sent, final = update(method, data, shared, personal, range(6))
    template = method.contribution(data.spec)
    assert {k: v.shape[1:] for k, v in sent.items()} == {k: v.shape for k, v in template.items()}
    assert (method.shape is Shape.NONE) == (not template)
    assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in personal.items()}
    first = method.model.init(data.spec, Rng.seeded(0))
    assert {k: v.shape[1:] for k, v in final.items()} == {k: v.shape for k, v in first.items()}


@every_method
def test_init_knows_only_public_facts(name):
    method = build(name)
    one, two = toy("regression", seed=0), toy("regression", seed=1)
    assert one.spec == two.spec
    assert same(method.init(one.spec, Rng.seeded(0)), method.init(two.spec, Rng.seeded(0)))


@every_case
@pytest.mark.parametrize("cohort", [None, 3.0])
def test_replay(name, task, model, cohort):
    """A client's model is rebuilt from its own data and the posts: the second premise of the lemma.

    The replay holds one client alone: nobody else's rows exist. It is told in which rounds it took
    part, as the client itself was.
    """
    method, data = make(name, model, task), toy(task)
    plan = Plan(
        method=method,
        privacy=Privacy(noise_multiplier=1.0, clip=0.5),
        sampler=Poisson(cohort),
        rounds=4,
        simulation_seed=5,
    )
    took_part = []
    outcome = simulate(plan, data, observe=lambda p: took_part.append(p.store.started.clone()))
    from coterie.privacy.entropy import open_entropy

    cohorts = [
        plan.sampler.draw(data.spec.clients, open_entropy(5, "cohort", r))
        for r in range(plan.posts)
    ]
    for client in range(data.spec.clients):
        rebuilt = _replay(plan, data, outcome.posts, cohorts, client)
        close({k: v[None] for k, v in outcome.model(client).items()}, rebuilt, 5e-5)


def _replay(plan, data, posts, cohorts, client):
    own = data.where(np.repeat(np.arange(len(data)), data.counts) == client)
    block = own.clients(np.array([client], dtype=np.int64))
    method, rng = plan.method, Rng.seeded(plan.simulation_seed)
    shared = method.init(data.spec, Rng.seeded(plan.simulation_seed).at("init"))
    personal = None
    for number, post in enumerate(posts):
        if client in cohorts[number]:
            if personal is None:
                personal = method.init_client_state(shared, data.spec, 1)
            mechanism = plan.mechanisms(data.spec.clients)[number]
            state = RoundState(method, mechanism, shared, rng, number)
            personal = client_half(state, personal, block).personal
        shared = method.server_update(shared, post)
    if personal is None:
        personal = method.init_client_state(shared, data.spec, 1)
    return method.personalise(shared, personal, block, rng.at("personalise"))


@every_case
def test_block_size_is_a_matter_of_speed(name, task, model):
    method, data = make(name, model, task), toy(task, clients=12)
    # A decomposed client is solved to high accuracy, which takes seconds: one round shows it.
    rounds = 1 if name == "mpmtl decompose" else 3
    plan = Plan(method=method, privacy=Privacy(epsilon=2.0), rounds=rounds, simulation_seed=3)
    reference = simulate(plan, data, speed=Speed(block=12))
    for block in (1, 5):
        other = simulate(plan, data, speed=Speed(block=block))
        close(reference.models.leaves, other.models.leaves, 5e-5)
    again = simulate(plan, data, speed=Speed(block=12))
    assert same(reference.models.leaves, again.models.leaves), "a seed must decide everything"


@every_method
def test_plan_round_trips_through_toml(name):
    plan = Plan(method=build(name), privacy=Privacy(epsilon=1.0), rounds=7)
    assert Plan.from_table(tomllib.loads(to_toml(plan.to_table()))) == plan


@every_method
def test_only_utility_contracts_may_be_declared_not_applicable(name):
    told = about(build(name).kind)
    assert set(told.not_applicable) <= {"learns"}
    assert all(len(reason) > 20 for reason in told.not_applicable.values())
    assert told.summary.endswith(".") and len(told.summary) <= 100 and told.releases


@every_method
def test_learns(name):
    """On easy synthetic clients the method halves the error of predicting the mean."""
    method = build(name)
    if "learns" in (reasons := about(method.kind).not_applicable):
        pytest.skip(f"{name}: learns does not apply: {reasons['learns']}")
    if "clip_own" in name:
        pytest.skip(f"{name}: models cut to the clip, as printed, are too short for these scores")
    data = synthetic("mean", clients=60, rows=30, features=4, spread=0.1, noise=0.1, seed=1).data
    train, test = data.split(0.3, 0)
    plan = Plan(method=method, privacy=Privacy(epsilon=8.0), rounds=15, simulation_seed=0)
    outcome = simulate(plan, train)
    score = evaluate(method.model, outcome.rows, test)
    assert score.value < 0.5, score


@every_method
def test_epsilon_is_what_the_plan_promised(name):
    data = toy("regression")
    method = build(name)
    private = Plan(method=method, privacy=Privacy(epsilon=1.5, delta=1e-6), rounds=5)
    outcome = simulate(private, data)
    expected = 0.0 if method.shape is Shape.NONE else 1.5
    assert outcome.guarantee.epsilon <= expected
    if method.clipping(1, 1).rows is None:
        assert outcome.guarantee.epsilon == pytest.approx(expected, rel=5e-3)
    else:  # a published conversion from rows asks for more noise than the account needs
        assert outcome.guarantee.epsilon > 0.1 * expected
    assert len(outcome.posts) == (0 if method.shape is Shape.NONE else 5)
    bare = simulate(replace(private, privacy=Privacy(epsilon=math.inf)), data)
    assert bare.guarantee.epsilon == (0.0 if method.shape is Shape.NONE else math.inf)
