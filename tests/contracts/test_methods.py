"""Contracts that every registered method keeps. The privacy contracts have no exceptions.

Privacy: purity, init from public facts, row independence (bitwise), replay from posts and own data,
declared shape. Utility (a method may declare one not applicable, with a reason): learns.
"""

import math
import tomllib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from coterie.core.config import to_toml
from coterie.core.rng import Rng
from coterie.core.tree import take
from coterie.data.synthetic import synthetic
from coterie.engine.rounds import RoundState, client_half
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.base import Shape, about, per_row_leaves, registered
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.models import MLP, Linear
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.entropy import open_entropy
from coterie.privacy.sampling import Poisson

# Settings that change what a method computes are held to the contracts like methods of their own.
# Those that name every client are for the six clients of `toy`.
CLUSTERS = (0, 1, 0, 1, 1, 0)
OPPOSED = tuple(  # clients 0 and 2, of which contracts change the second
    tuple(float(i == j) + float(i in (0, 2) and j in (0, 2)) for j in range(6)) for i in range(6)
)
PATH = tuple(
    tuple(2.3 - (i in (0, 5)) if i == j else -float(abs(i - j) == 1) for j in range(6))
    for i in range(6)
)
DEGREES = (1.3, 2.3, 2.3, 2.3, 2.3, 1.3)
VARIANTS = {
    "pmtl clusters": ("pmtl", {"clusters": CLUSTERS}),
    "pmtl clusters own sgd": (
        "pmtl",
        {"clusters": CLUSTERS, "change_from": "own", "solver": "sgd", "last_solve": False},
    ),
    "related opposed": ("related", {"omega": OPPOSED}),
    "related degrees sgd": ("related", {"omega": PATH, "diagonal": DEGREES, "solver": "sgd"}),
    "related opposed start": ("related", {"omega": OPPOSED, "change_from": "start"}),
    "finetune mean pmtl": ("finetune", {"base": PMTL(), "how": "mean"}),
    "finetune kl": ("finetune", {"base": FedAvg(prox=0.1), "how": "kl"}),
    "finetune ewc pmtl": ("finetune", {"base": PMTL(), "how": "ewc"}),
    "finetune mean dpfedmtl": ("finetune", {"base": DPFedMTL(), "how": "mean"}),
    "finetune kl dpfedmtl": ("finetune", {"base": DPFedMTL(), "how": "kl"}),
    "finetune ewc dpfedmtl": ("finetune", {"base": DPFedMTL(), "how": "ewc"}),
    "adaptive pmtl": ("adaptive", {"base": PMTL(), "start": 0.05}),
    "adaptive dpfedmtl": ("adaptive", {"base": DPFedMTL()}),
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
    "pfeb structure": ("pfeb", {"structure": 1.0}),
    "pfeb curves": ("pfeb", {"curves": 2}),
    "pfeb guard": ("pfeb", {"guard": True}),
    "pfeb huber": ("pfeb", {"huber": 1.0}),
    "pfeb slice": ("pfeb", {"shared": "slice", "directions": 2}),
    "pmtl slice": ("pmtl", {"shared": "slice", "directions": 2}),
    # With a large mu and a sparse own part the two parts are found in few steps.
    "mpmtl decompose": ("mpmtl", {"decompose": 0.2, "mu": 1.0}),
    "mpmtl steps decompose column": (
        "mpmtl",
        {"solver": "steps", "decompose": 0.02, "decompose_by": "column"},
    ),
}
KINDS = registered()
POOLED = sorted(n for n, kind in KINDS.items() if kind().shape is Shape.POOLED)
METHODS = sorted(set(KINDS) - set(POOLED)) + sorted(VARIANTS)
CASES = [
    ("regression", Linear()),
    ("binary", Linear()),
    ("multiclass", Linear()),
    ("regression", MLP(hidden=(4,))),
]


def build(name, **settings):
    kind, chosen = VARIANTS.get(name, (name, {}))
    return KINDS[kind](**chosen, **settings)


def toy(task, clients=6, seed=0):
    return synthetic(
        "mean", clients=clients, rows=(3, 9), features=4, task=task, spread=0.3, seed=seed
    ).data


@cache
def spec_of(task):
    return toy(task).spec


def refusal(name, task, model):
    """What a method says to a task and a model that it cannot work on; None if it can."""
    try:
        build(name, model=model).check(spec_of(task))
    except ValueError as error:
        return str(error)
    return None


ALL = [(name, task, model) for name in METHODS for task, model in CASES]
TOLD = [refusal(*case) for case in ALL]
TAKEN = [case for case, told in zip(ALL, TOLD, strict=True) if told is None]


BY_STEPS = ("finetune", "sgd")  # in the names of variants that SGD fits, whatever the model


def is_tried(name, task, model):
    """Of settings that take several classes, two classes show nothing more.

    Nor does a linear regression of variants by SGD, next to linear classes and a network's
    regression.
    """
    if name not in VARIANTS or (name, "multiclass", model) not in TAKEN:
        return True
    by_steps = any(word in name for word in BY_STEPS) and (name, *CASES[-1]) in TAKEN
    return task != "binary" and not (by_steps and (task, model) == CASES[0])


def marks(name):
    """Variants are not part of the daily subset."""
    return pytest.mark.full if name in VARIANTS else ()


every_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in METHODS]
)
every_case = pytest.mark.parametrize(
    "name,task,model",
    [
        pytest.param(
            *case, marks=marks(case[0]), id=f"{case[0]}-{case[1]}-{type(case[2]).__name__}"
        )
        for case in TAKEN
        if is_tried(*case)
    ],
)


@pytest.fixture(autouse=True)
def few_inner_steps(monkeypatch):
    """Contracts hold after any number of steps: MP-MTL's two parts need thousands to be exact."""
    monkeypatch.setattr("coterie.methods.mpmtl._INNER", 20)
    monkeypatch.setattr("coterie.methods.mpmtl._STILL", 1e-5)


def test_refusals_say_what_is_wrong_and_what_to_use():
    for (_, task, model), told in zip(ALL, TOLD, strict=True):
        if told is not None:
            assert "use " in told and (task in told or type(model).__name__ in told), told


def test_no_method_refuses_everything():
    for name in METHODS:
        build(name).check(spec_of("regression"))


@pytest.mark.parametrize("name", POOLED)
def test_pooled_methods_are_never_private(name):
    method, data = KINDS[name](), toy("regression")
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


def update(method, data, ids=range(6), state=None):
    """Return the personal state, the contributions and the models of some clients."""
    shared, personal = state or state_of(method, data)
    block = data.clients(np.asarray(ids, dtype=np.int64))
    rows = take(personal, torch.as_tensor(ids))
    after, sent = method.local_update(shared, rows, block, Rng.seeded(1), 0)
    final = method.personalise(shared, after, block, Rng.seeded(2))
    return after, sent, final


@cache
def updated(name, task, model):
    """Return the update of all clients, which several contracts compare with."""
    return update(build(name, model=model), toy(task))


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[k], right[k]) for k in left)


def close(left, right, tolerance=2e-5):
    assert left.keys() == right.keys()
    for k in left:
        torch.testing.assert_close(left[k], right[k], rtol=tolerance, atol=tolerance)


@every_case
def test_pure_and_of_the_declared_shape(name, task, model):
    method, data = build(name, model=model), toy(task)
    state = state_of(method, data)
    before = [{k: v.clone() for k, v in tree.items()} for tree in state]
    features, targets = data.features.clone(), data.targets.clone()
    after, sent, final = found = update(method, data, state=state)
    assert all(same(a, b) for a, b in zip(found, updated(name, task, model), strict=True))
    assert all(same(*trees) for trees in zip(state, before, strict=True))
    assert torch.equal(features, data.features) and torch.equal(targets, data.targets)
    template = method.contribution(data.spec)
    assert {k: v.shape[1:] for k, v in sent.items()} == {k: v.shape for k, v in template.items()}
    assert (method.shape is Shape.NONE) == (not template)
    assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in state[1].items()}
    between = method.current_models(*state, data.clients(np.arange(6)))
    first = method.model.init(data.spec, Rng.seeded(0))
    for models in (final, between):
        assert {k: v.shape for k, v in models.items()} == {
            k: (6, *v.shape) for k, v in first.items()
        }


@every_case
def test_row_independence(name, task, model):
    """Change everything about one client and break another: no other may move by a bit."""
    method, data = build(name, model=model), toy(task)
    shared, personal = state_of(method, data)
    features, targets = data.features.clone(), data.targets.clone()
    start, stop = data.offsets[2], data.offsets[3]
    features[start:stop] = features[start:stop].abs() * -3 + 1
    targets[start:stop] = 0 if task == "multiclass" else 1 - targets[start:stop]
    features[data.offsets[4]] = math.nan
    other = replace(data, features=features, targets=targets)
    moved = {k: v.clone() for k, v in personal.items()}
    for leaf in moved.values():
        leaf[2] += 1
    ours, theirs = updated(name, task, model), update(method, other, state=(shared, moved))
    rest = torch.tensor([0, 1, 3, 5])
    for mine, his in zip(ours, theirs, strict=True):
        assert same(take(mine, rest), take(his, rest))
    if method.shape is not Shape.NONE:
        one = torch.tensor([2])
        assert not same(take(ours[1], one), take(theirs[1], one)), "a change must matter to itself"


@every_case
def test_how_many_rows_a_client_has_is_nobody_elses_business(name, task, model):
    """Return clients fewer and more rows, far from the origin: no other may move by a bit."""
    method, data = build(name, model=model), toy(task)
    data = replace(data, features=data.features + 100)
    counts = np.where(np.arange(6) == 2, 1, np.where(np.arange(6) == 4, 30, data.counts))
    rows = [np.arange(*data.offsets[client : client + 2]) for client in range(6)]
    index = np.concatenate(
        [np.resize(mine, count) for mine, count in zip(rows, counts, strict=True)]
    )
    other = replace(
        data,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        features=data.features[torch.from_numpy(index)],
        targets=data.targets[torch.from_numpy(index)],
    )
    rest = torch.tensor([0, 1, 3, 5])
    for mine, his in zip(update(method, data), update(method, other), strict=True):
        if isinstance(model, Linear):
            assert same(take(mine, rest), take(his, rest))
        else:
            close(take(mine, rest), take(his, rest))


@every_case
def test_order_and_stack_size_do_not_matter(name, task, model):
    method, data = build(name, model=model), toy(task)
    for ids in ([3, 0, 5, 1, 4, 2], [0], [3]):
        for mine, his in zip(updated(name, task, model), update(method, data, ids), strict=True):
            close(take(mine, torch.tensor(ids)), his)


@every_method
def test_init_knows_only_public_facts(name):
    method = build(name)
    one, two = toy("regression", seed=0), toy("regression", seed=1)
    assert one.spec == two.spec
    assert same(method.init(one.spec, Rng.seeded(0)), method.init(two.spec, Rng.seeded(0)))


@every_case
def test_replay(name, task, model):
    """A client's model is rebuilt from its own data and the posts: the second premise of the lemma.

    The replay holds one client alone: nobody else's rows exist. It is told in which rounds it took
    part, as the client itself was.
    """
    data = toy(task)
    plan = Plan(
        method=build(name, model=model),
        privacy=Privacy(noise_multiplier=1.0, clip=0.5),
        # Three of six are drawn, but for one case in which all take part.
        sampler=Poisson(None if (task, model) == CASES[0] else 3.0),
        rounds=3,
        simulation_seed=5,
    )
    outcome = simulate(plan, data)
    cohorts = [plan.sampler.draw(6, open_entropy(5, "cohort", r)) for r in range(plan.posts)]
    for client in (0, 2, 5):
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


@every_method
def test_block_size_is_a_matter_of_speed(name):
    """Once per method: that updates do not depend on the stack is checked above for every case."""
    data = toy("regression")
    plan = Plan(
        method=build(name),
        privacy=Privacy(epsilon=2.0),
        rounds=2,
        simulation_seed=3,
    )
    reference, other, again = (simulate(plan, data, speed=Speed(block=n)) for n in (6, 4, 6))
    close(reference.models.leaves, other.models.leaves, 5e-5)
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
    if method.serving.fixed_membership:
        pytest.skip(f"{name}: names six clients, too few to learn from")
    if "clip_own" in name:
        pytest.skip(f"{name}: models cut to the clip, as printed, are too short for these scores")
    data = synthetic("mean", clients=60, rows=30, features=4, spread=0.1, noise=0.1, seed=1).data
    train, test = data.split(0.3, 0)
    plan = Plan(method=method, privacy=Privacy(epsilon=8.0), rounds=5, simulation_seed=0)
    outcome = simulate(plan, train)
    score = evaluate(method.model, outcome.rows, test)
    assert score.value < 0.5, score


@every_method
def test_epsilon_is_what_the_plan_promised(name):
    data = toy("regression")
    method = build(name)
    private = Plan(method=method, privacy=Privacy(epsilon=1.5, delta=1e-6), rounds=3)
    outcome = simulate(private, data)
    expected = 0.0 if method.shape is Shape.NONE else 1.5
    assert outcome.guarantee.epsilon <= expected
    if method.clipping(1, 1).rows is None:
        assert outcome.guarantee.epsilon == pytest.approx(expected, rel=5e-3)
    else:  # a published conversion from rows asks for more noise than the account needs
        assert outcome.guarantee.epsilon > 0.1 * expected
    assert len(outcome.posts) == (0 if method.shape is Shape.NONE else 3)
    bare = simulate(replace(private, privacy=Privacy(epsilon=math.inf)), data)
    assert bare.guarantee.epsilon == (0.0 if method.shape is Shape.NONE else math.inf)
