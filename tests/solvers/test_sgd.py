"""Local SGD against a plain torch.optim loop over one client, and its paths against one another."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from tests.solvers.rows import everyone, federate

from coterie.core.rng import Rng
from coterie.core.tree import stack
from coterie.models import CNN, MLP, Linear, Model, as_model, row_losses
from coterie.solvers import sgd as module
from coterie.solvers.sgd import SGD, Near, computed_in
from coterie.solvers.sgd_kernels import draw_batches

TASKS = ("regression", "binary", "multiclass", "multilabel")
COUNTS = (7, 1, 0, 13, 3, 8)
MODELS = {
    "linear": (Linear(), (6,)),
    "linear without bias": (Linear(bias=False), (2, 3)),
    "mlp": (MLP(hidden=(5,), activation="tanh"), (6,)),
    "cnn": (CNN(channels=(2, 3), kernel=2, hidden=(4,)), (8, 7)),
}
RNG = Rng.seeded(5)


class Plain(Model):
    """A user's model: only what must be written."""

    def init(self, spec, rng):
        return {"slope": torch.ones(spec.features), "unused": torch.ones(2)}

    def apply(self, params, x):
        return (x.flatten(1) * params["slope"]).sum(dim=1).tanh()


def dataset(task, shape=(6,), counts=COUNTS, is_sparse=False, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    rows, outputs = sum(counts), 1 if task in ("regression", "binary") else 4
    x = torch.randn(rows, *shape, generator=generator, dtype=dtype)
    if is_sparse:
        x = x * (torch.rand(x.shape, generator=generator) < 0.5)
    y = {
        "regression": torch.randn(rows, generator=generator, dtype=dtype),
        "binary": torch.randint(0, 2, (rows,), generator=generator).to(dtype),
        "multiclass": torch.randint(0, outputs, (rows,), generator=generator),
        "multilabel": torch.randint(0, 2, (rows, outputs), generator=generator).to(dtype),
    }[task]
    data = federate(task, counts, x, y, outputs)
    return replace(data, features=sparse.csr_matrix(x.flatten(1).numpy())) if is_sparse else data


def trees(model, data, seed=0):
    """A stacked start, an unstacked anchor and a stacked one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: leaf.shape for name, leaf in model.init(data.spec, RNG).items()}

    def draw(*lead):
        return {
            name: 0.4 * torch.randn(*lead, *shape, generator=generator, dtype=numbers(data))
            for name, shape in shapes.items()
        }

    return draw(len(data)), draw(), draw(len(data))


def numbers(data):
    return torch.float32 if data.is_sparse else data.features.dtype


def plain_loop(settings, model, start, data, client, *, round=0, anchor=None, lam=0.0):
    """One client by torch.optim.SGD, the proximal term as part of the loss, on the same batches."""
    begin, end = data.offsets[client : client + 2]
    x = data.features[begin:end]
    x = torch.from_numpy(x.toarray()).reshape(-1, *data.spec.shape) if data.is_sparse else x
    y = data.targets[begin:end]
    counts = np.array([end - begin])
    steps = settings.count_steps(counts)
    batches = draw_batches(RNG.keys(np.array([client])), counts, steps, settings.batch)[0]
    params = {name: leaf[client].clone().requires_grad_() for name, leaf in start.items()}
    halvings = round // settings.halve_every if settings.halve_every else 0
    optimiser = torch.optim.SGD(
        params.values(), lr=settings.lr / 2**halvings, momentum=settings.momentum
    )
    for batch in batches:
        rows = torch.from_numpy(batch[batch >= 0]).long()
        loss = row_losses(data.spec.task, model.apply(params, x[rows]), y[rows]).mean()
        for name, leaf in params.items():
            centre = 0 if anchor is None else anchor[name]
            centre = (
                centre[client] if torch.is_tensor(centre) and centre.dim() > leaf.dim() else centre
            )
            loss = loss + lam / 2 * (leaf - centre).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: leaf.detach() for name, leaf in params.items()}


def assert_trees_close(found, wanted, rtol=2e-4, atol=2e-5):
    assert list(found) == list(wanted)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=rtol, atol=atol)


def assert_matches_plain_loop(settings, model, data, **rest):
    start = trees(model, data)[0]
    found = settings(model, start, everyone(data), RNG, **rest)
    for client in range(len(data)):
        own = {name: leaf[client] for name, leaf in found.items()}
        assert_trees_close(own, plain_loop(settings, model, start, data, client, **rest))
        if data.counts[client] == 0:
            assert all(torch.equal(own[name], start[name][client]) for name in own)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_every_path_equals_a_plain_loop(task, name, fast):
    model, shape = MODELS[name]
    data = dataset(task, shape)
    settings = SGD(lr=0.1, epochs=2, batch=4, momentum=0.6, fast=fast)
    anchor = trees(model, data)[1]
    assert_matches_plain_loop(settings, model, data, anchor=anchor, lam=0.3)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["none", "zero", "shared", "stacked"])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_anchors(name, kind, fast):
    model, shape = MODELS[name]
    data = dataset("multiclass", shape)
    _, shared, stacked = trees(model, data)
    anchor = {"none": None, "zero": None, "shared": shared, "stacked": stacked}[kind]
    settings = SGD(lr=0.1, steps=5, batch=4, fast=fast)
    assert_matches_plain_loop(
        settings, model, data, anchor=anchor, lam=0.0 if kind == "none" else 0.5
    )


@pytest.mark.parametrize("name", MODELS)
def test_sparse_rows_equal_dense_ones(name):
    model, shape = MODELS[name]
    data = dataset("multiclass", shape, is_sparse=True)
    settings = SGD(lr=0.1, epochs=2, batch=4, momentum=0.3)
    assert_matches_plain_loop(settings, model, data, anchor=trees(model, data)[1], lam=0.2)


def test_linear_without_the_kernel_is_the_same(monkeypatch):
    data = dataset("multiclass")
    start, anchor, _ = trees(Linear(), data)
    settings = SGD(lr=0.1, epochs=3, batch=4, momentum=0.5)
    kernel = settings(Linear(), start, everyone(data), RNG, anchor=anchor, lam=0.1)
    monkeypatch.setattr(module, "_fits_kernel", lambda *_: False)
    torch_only = settings(Linear(), start, everyone(data), RNG, anchor=anchor, lam=0.1)
    assert_trees_close(torch_only, kernel)


def test_double_precision_goes_through_every_path():
    for name in ("linear", "mlp"):
        model, shape = MODELS[name]
        data = dataset("regression", shape, dtype=torch.float64)
        start = trees(model, data)[0]
        fast = SGD(epochs=2)(model, start, everyone(data), RNG)
        slow = SGD(epochs=2, fast=False)(model, start, everyone(data), RNG)
        assert_trees_close(fast, slow, rtol=1e-12, atol=1e-12)
        assert all(leaf.dtype == torch.float64 for leaf in fast.values())
    mixed = {name: leaf.float() for name, leaf in start.items()}
    assert all(
        leaf.dtype == torch.float32 for leaf in SGD()(model, mixed, everyone(data), RNG).values()
    )


def test_a_model_with_nothing_but_apply():
    data = dataset("regression")
    model = Plain()
    start = stack(model.init(data.spec, RNG), len(data))
    fast = SGD(epochs=2, momentum=0.5)(model, start, everyone(data), RNG)
    slow = SGD(epochs=2, momentum=0.5, fast=False)(model, start, everyone(data), RNG)
    assert_trees_close(fast, slow)
    assert torch.equal(fast["unused"], start["unused"])


def test_a_loss_that_is_no_number_marks_its_client_although_its_gradient_is_finite():
    class Odd(Plain):
        def losses(self, task, outputs, targets):
            return outputs + torch.tensor([[0.0], [math.nan], [math.inf]])

    params = {"slope": torch.ones(3, 2, requires_grad=True)}
    batch = module.Batch(torch.ones(3, 4, 2), torch.zeros(3, 4), torch.full((3, 4), 0.25))
    (found,) = module.stacked_gradient(Odd(), "regression", ["slope"])(params, batch, None)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_gradients_do_not_need_a_grad_mode():
    model, shape = MODELS["cnn"]
    data = dataset("multiclass", shape)
    start = trees(model, data)[0]
    wanted = SGD()(model, start, everyone(data), RNG)
    with torch.no_grad():
        found = SGD()(model, start, everyone(data), RNG)
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert not any(leaf.requires_grad for leaf in found.values())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_untouched_and_runs_repeat(name, fast):
    model, shape = MODELS[name]
    data = dataset("multiclass", shape)
    start, _, anchor = trees(model, data)
    before = [leaf.clone() for tree in (start, anchor) for leaf in tree.values()]
    rows = data.features.clone(), data.targets.clone()
    settings = SGD(epochs=2, momentum=0.5, fast=fast)
    first = settings(model, start, everyone(data), RNG, anchor=anchor, lam=0.1)
    again = settings(model, start, everyone(data), RNG, anchor=anchor, lam=0.1)
    assert all(torch.equal(first[leaf], again[leaf]) for leaf in first)
    after = [leaf for tree in (start, anchor) for leaf in tree.values()]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert torch.equal(rows[0], data.features) and torch.equal(rows[1], data.targets)


@pytest.mark.parametrize("bad", ["changed", "nan"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_client_depends_on_its_own_rows_alone(name, fast, bad):
    model, shape = MODELS[name]
    data, other = dataset("multiclass", shape), dataset("multiclass", shape)
    spoilt = 3
    value = {"changed": 2.0, "nan": math.nan}[bad]
    other.features[data.offsets[spoilt]] = value
    start, anchor, _ = trees(model, data)
    settings = SGD(epochs=2, batch=4, momentum=0.5, fast=fast)
    before = settings(model, start, everyone(data), RNG, anchor=anchor, lam=0.1)
    after = settings(model, start, everyone(other), RNG, anchor=anchor, lam=0.1)
    others = [client for client in range(len(data)) if client != spoilt]
    for leaf in before:
        assert torch.equal(before[leaf][others], after[leaf][others])
    assert any(not torch.equal(before[leaf][spoilt], after[leaf][spoilt]) for leaf in before)
    if bad != "changed":
        assert not all(after[leaf][spoilt].isfinite().all() for leaf in after)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_order_and_company_do_not_matter(name, fast, monkeypatch):
    model, shape = MODELS[name]
    data = dataset("multiclass", shape)
    start, anchor, own_anchor = trees(model, data)
    settings = SGD(epochs=2, batch=4, momentum=0.5, fast=fast)
    together = settings(model, start, everyone(data), RNG, anchor=own_anchor, lam=0.1)
    order = np.array([4, 0, 5, 3, 1, 2])
    mixed = settings(
        model,
        {leaf: rows[order] for leaf, rows in start.items()},
        data.clients(order),
        RNG,
        anchor={leaf: rows[order] for leaf, rows in own_anchor.items()},
        lam=0.1,
    )
    assert_trees_close(mixed, {leaf: rows[order] for leaf, rows in together.items()})
    together = settings(model, start, everyone(data), RNG, anchor=anchor, lam=0.1)
    for client in range(len(data)):
        alone = settings(
            model,
            {leaf: rows[client : client + 1] for leaf, rows in start.items()},
            data.clients(np.array([client])),
            RNG,
            anchor=anchor,
            lam=0.1,
        )
        assert_trees_close(
            alone, {leaf: rows[client : client + 1] for leaf, rows in together.items()}
        )
    if fast and name == "mlp":
        monkeypatch.setattr(module, "_CACHED", 1)
        few = settings(model, start, everyone(data), RNG, anchor=anchor, lam=0.1)
        assert_trees_close(few, together)


class Recurs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.LSTM(3, 5, batch_first=True)
        self.after, self.head = torch.nn.GRU(5, 70, batch_first=True), torch.nn.Linear(70, 4)

    def forward(self, x):
        return self.head(self.after(self.body(x[:, :3])[0])[1][0])


class Images(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pool = torch.nn.Conv2d(1, 3, 2), torch.nn.MaxPool2d(2)
        self.block = torch.nn.Sequential(
            torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
        )
        self.head = torch.nn.Linear(10, 4)

    def forward(self, x):
        return self.head(self.block(self.pool(self.body(x))).flatten(1))


ODD = {
    "linear": (Linear(), (37,)),
    "mlp": (MLP(hidden=(23,)), (37,)),
    "cnn": (CNN(channels=(2, 3), kernel=2, hidden=(5,)), (9, 7)),
    "module": (as_model(lambda: torch.nn.Sequential(*layers())), (37,)),
    "recurrent": (as_model(Recurs), (37, 3)),
    "images": (as_model(Images), (1, 9, 7)),
}
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def layers():
    return torch.nn.Linear(37, 11), torch.nn.LayerNorm(11), torch.nn.Tanh(), torch.nn.Linear(11, 4)


def models_by_client(model, data, settings, size, **call):
    """Train block by block, as an engine does; with `alone`, each client of a block by itself."""
    alone, found = call.pop("alone", False), {}
    for block in data.blocks(np.arange(len(data)), size):
        parts = [block.at(torch.tensor([place])) for place in range(len(block))]
        for part in parts if alone else [block]:
            first = model.init(data.spec, RNG)
            start = {name: leaf.to(data.targets.device) for name, leaf in first.items()}
            after = settings(model, stack(start, len(part)), part, RNG, **call)
            for place, client in enumerate(part.ids.tolist()):
                found[client] = {name: leaf[place].clone() for name, leaf in after.items()}
    return found


def assert_same_bits(found, wanted, clients):
    for client in clients:
        for name, leaf in wanted[client].items():
            assert torch.equal(found[client][name], leaf), (client, name)


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in ODD if name not in {"recurrent", "images"}]
    + [pytest.param(name, "cuda", marks=NEEDS_CUDA) for name in ODD],
)
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 6}], ids=["epochs", "steps"])
def test_bits_do_not_depend_on_how_many_rows_others_have(name, length, device):
    """The shape of a stack and the places in it are public, so its rounding is."""
    model, shape = ODD[name]
    settings = SGD(**length, batch=10, momentum=0.5, lr=1.0)
    counts, changed = [5 + 12 * (client % 4) for client in range(17)], 3
    many = 60
    whole = dataset("multiclass", shape, [*counts, many]).to(device)

    def with_rows(count):
        """The federation in which one client holds `count` of the last client's rows."""
        rows, offsets = [], whole.offsets
        for client in range(len(counts)):
            first = offsets[-2] if client == changed else offsets[client]
            rows.append(np.arange(first, first + (count if client == changed else counts[client])))
        kept = torch.from_numpy(np.concatenate(rows)).to(device)
        held = [count if client == changed else one for client, one in enumerate(counts)]
        return federate("multiclass", held, whole.features[kept], whole.targets[kept], 4)

    others = [client for client in range(len(counts)) if client != changed]
    for precision in ("float32", "bfloat16", "tf32"):
        with computed_in(precision):
            wanted = models_by_client(model, with_rows(4), settings, 8)
            for count in (0, 1, many):
                found = models_by_client(model, with_rows(count), settings, 8)
                assert_same_bits(found, wanted, others)
            found = models_by_client(model, with_rows(4), settings, 8, alone=True)
            assert_same_bits(found, wanted, range(len(counts)))


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs torch 2.9"
)
def test_only_tf32_rounds_factors_and_settings_are_restored():
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)

    def state():
        return [place.fp32_precision for place in places]

    before, seen = state(), []
    for precision in ("float32", "bfloat16", "tf32"):
        with computed_in(precision), module._rounding(torch.device("cuda")):
            seen.append(state())
        assert state() == before
    assert seen == [["ieee"] * 2, ["ieee"] * 2, ["tf32"] * 2]


def test_learning_rate_halves():
    settings = SGD(lr=0.2, halve_every=10)
    assert [settings.rate(round) for round in (0, 9, 10, 25, 40)] == [0.2, 0.2, 0.1, 0.05, 0.0125]
    assert SGD(lr=0.2).rate(1000) == 0.2
    for name in ("linear", "mlp"):
        model, shape = MODELS[name]
        assert_matches_plain_loop(settings, model, dataset("binary", shape), round=25)


def test_steps_instead_of_epochs():
    counts = np.array(COUNTS)
    assert SGD(epochs=3, batch=4).count_steps(counts).tolist() == [6, 3, 0, 12, 3, 6]
    assert SGD(epochs=3, steps=5).count_steps(counts).tolist() == [5, 5, 0, 5, 5, 5]
    assert SGD(epochs=3, batch=4, most_steps=4).count_steps(counts).tolist() == [4, 3, 0, 4, 3, 4]


def test_nobody_and_nothing():
    data = dataset("regression", counts=(0, 0))
    for model in (Linear(), MLP()):
        for fast in (True, False):
            start = stack(model.init(data.spec, RNG), 2)
            found = SGD(fast=fast)(model, start, everyone(data), RNG)
            assert all(torch.equal(found[leaf], start[leaf]) for leaf in start)
            none = {leaf: rows[:0] for leaf, rows in start.items()}
            found = SGD(fast=fast)(model, none, data.clients(np.arange(0)), RNG)
            assert all(len(rows) == 0 for rows in found.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0), ("lr", math.nan), ("lr", math.inf), ("momentum", 1.0), ("momentum", -0.1),
        ("epochs", 0), ("steps", 0), ("batch", 0), ("halve_every", -1),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: given {value}; expected"):
        SGD(**{field: value})


def test_trees_that_do_not_fit_are_refused():
    data = dataset("regression")
    start, anchor, _ = trees(Linear(), data)
    with pytest.raises(ValueError, match="expected one row for each of 6 clients: stack"):
        SGD()(Linear(), anchor, everyone(data), RNG)
    with pytest.raises(ValueError, match=r"anchor: given leaves \['weight'\]; expected"):
        SGD()(Linear(), start, everyone(data), RNG, anchor={"weight": anchor["weight"]}, lam=1)
    wrong = {"weight": anchor["weight"][:, :3], "bias": anchor["bias"]}
    with pytest.raises(ValueError, match=r"anchor\['weight'\]: given shape \(1, 3\); expected"):
        SGD()(Linear(), start, everyone(data), RNG, anchor=wrong, lam=1)
    with pytest.raises(ValueError, match="lam: given -1; expected a finite number >= 0"):
        SGD()(Linear(), start, everyone(data), RNG, lam=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 6}], ids=["ragged", "recorded"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_cuda_agrees_with_the_cpu(name, momentum, length):
    """With an even number of steps a step is recorded and replayed: twice, on other numbers."""
    model, shape = MODELS[name]
    data = dataset("multiclass", shape)
    start, anchor, _ = trees(model, data)
    settings = SGD(**length, batch=4, momentum=momentum)
    first = data.to("cuda").clients(np.arange(len(data)))
    settings(model, {k: v.cuda() + 1 for k, v in start.items()}, first, RNG, anchor=anchor, lam=0.1)
    wanted = settings(model, start, everyone(data), RNG, anchor=anchor, lam=0.1)
    moved = {leaf: rows.cuda() for leaf, rows in start.items()}
    clients = data.to("cuda").clients(np.arange(len(data)))
    found = settings(model, moved, clients, RNG, anchor=anchor, lam=0.1)
    assert_trees_close({leaf: rows.cpu() for leaf, rows in found.items()}, wanted, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("counts", [COUNTS, (9,) * 6, (0, 9, 3, 0, 7, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_steps_recorded_at_once_are_those_recorded_one_by_one(name, counts, monkeypatch):
    model, shape = MODELS[name]
    data = dataset("multiclass", shape, counts=counts).to("cuda")
    start, anchor, _ = trees(model, data)
    settings, found = SGD(steps=5, batch=4, momentum=0.5), []
    for most in (32, 0):
        monkeypatch.setattr(module, "_AT_ONCE", most)
        for change in (1, 0):  # the second call replays what the first has recorded
            moved = {leaf: rows.cuda() + change for leaf, rows in start.items()}
            clients = data.clients(np.arange(len(data)))
            after = settings(model, moved, clients, RNG, anchor=anchor, lam=0.1)
        found.append(after)
    for leaf, rows in found[0].items():
        assert torch.equal(rows, found[1][leaf])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("term", ["kl", "ewc"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_recorded_penalties_agree_with_the_cpu(name, term):
    model, shape = MODELS[name]
    data = dataset("multiclass", shape)
    start, anchor, toward = trees(model, data)
    settings = SGD(steps=6, batch=4, momentum=0.5)
    there = {device: data.to(device) for device in ("cpu", "cuda")}  # a recording is of these rows

    def train(device, change):
        moved = {leaf: (rows + change).to(device) for leaf, rows in start.items()}
        theirs = {leaf: rows.to(device) for leaf, rows in toward.items()}
        lam = {leaf: rows.abs() for leaf, rows in theirs.items()} if term == "ewc" else 0.0
        clients = there[device].clients(np.arange(len(data)))
        near = Near(0.7, theirs) if term == "kl" else None
        found = settings(model, moved, clients, RNG, anchor=anchor, lam=lam, near=near)
        return {leaf: rows.cpu() for leaf, rows in found.items()}

    before = module.record_all.cache_info().misses
    train("cuda", 1.0)  # the recording is replayed with other numbers
    assert_trees_close(train("cuda", 0.0), train("cpu", 0.0), atol=1e-3)
    assert module.record_all.cache_info().misses == before + 1


FUSED = """
import torch
from coterie.solvers import sgd_gpu
from coterie.solvers.sgd import SGD, Stack
from tests.solvers.test_sgd import recipe_of, stack_of
for terms in ((), ("v",), ("a",), ("1",), ("a", "w"), ("v", "1", "w")):
    for sizes in ([(2, 3)], [(2, 600), (2, 4, 256), (2, 0)], [(2, size) for size in range(1, 19)]):
        solver = SGD(lr=0.3, momentum=0.6 if "v" in terms else 0.0)
        stack, grads = stack_of(sizes, terms)
        exact, _ = stack_of(sizes, terms)
        solver._step(exact, recipe_of(exact), grads)
        lists = (stack.velocities, stack.anchors, stack.weights)
        leaves = list(stack.params.values())
        sgd_gpu.move(leaves, grads, *lists, lr=0.3, lam=0.2, momentum=solver.momentum)
        for ours, theirs in zip(leaves + lists[0], [*exact.params.values(), *exact.velocities]):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
for name, same in sgd_gpu._CHECKS.items():
    assert same(torch.device("cpu")), name
scores = torch.zeros(2, 100, 200)
assert sgd_gpu.weighted_losses(scores, scores[..., 0].long(), scores[..., 0]) is None
"""


def stack_of(sizes, terms):
    draws = torch.Generator().manual_seed(0)

    def leaves():
        return [torch.randn(size, generator=draws) for size in sizes]

    params = {str(place): leaf for place, leaf in enumerate(leaves())}
    lists = [leaves() if term in terms else [] for term in "vaw"]
    if "1" in terms:  # one anchor for all clients
        lists[1] = [leaf[:1] for leaf in leaves()]
    return module.Stack(params, *lists, {}), leaves()


def recipe_of(stack):
    proximal = module.Proximal(0.2, {}, {})
    return module._Work(None, "regression", tuple(stack.params), proximal, None, 0.3)


@pytest.mark.slow
def test_the_fused_step_is_torchs_in_the_interpreter():
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", FUSED], check=True, env=environment)
