"""What a curious server could learn: rows of a client, reconstructed from its contribution.

A server that adds contributions up sees each of them, clipped, before noise. Epsilon against the
other clients does not cover this view. `reconstruct` attacks some clients in three settings:

- "trusted": the server receives each client's clipped contribution;
- "secure_aggregation": it receives the sum over a cohort, and takes it for the client's;
- "client_noise": it receives each contribution with the client's own noise (noise = "local"),
  calibrated to the epsilon of the plan.

Contributions come from the code of a run, `client_half`, in the first round, in which the shared
model is the public start. MTL-SVM is attacked over all rounds (`coterie.audit.svm`). The attacker
knows the method, the model, the number of rows, the mean row and the spread of all clients' rows,
and the client's targets. Of one row the class is inferred from the biases of the last layer (Zhao,
Mopuri, Bilen 2020, "iDLG", https://arxiv.org/abs/2001.02610).

**One row, and a dense first layer with biases.** Unit j has the gradient delta_j x by its weights
and delta_j by its bias, in every step and at any clip. So x is their ratio, by least squares over
units (Phong, Aono, Hayashi, Wang, Moriai 2018, "Privacy-preserving deep learning via additively
homomorphic encryption"). A linear model without biases reveals only the direction of x.

**Several rows, or another first layer.** The update is taken for one gradient step. Adam searches,
from several starts, for rows whose gradient has the largest cosine with it (Zhu, Liu, Han 2019,
"Deep leakage from gradients", https://arxiv.org/abs/1906.08935; Geiping, Bauermeister, Dröge,
Moeller 2020, "Inverting gradients", https://arxiv.org/abs/2003.14053). There is a weak penalty on
the distance from the mean row and, for images, on the total variation. The last start consists of
ratios of single units: a rectified unit that is active for one row reveals it. A linear model has
one ratio per output, a weighted sum of the rows. With few outputs it reveals little of many rows.

The error of a row is |found - true|^2 over the mean of |row - mean row|^2 of all rows, after found
and true rows are matched one to one. The mean row, as a guess, has error 1 on average. A better
attack may find more: results are lower bounds on what a server could learn. Only noise has a proof.
"""

import functools
import math
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.audit import svm
from coterie.audit.simulation import record
from coterie.core.rng import Rng
from coterie.core.tree import Tree, size
from coterie.data.federated import FederatedDataset, Spec
from coterie.engine.rounds import RoundState, client_half
from coterie.engine.store import Ids
from coterie.methods.base import Method, Shape, about
from coterie.methods.ditto import Ditto
from coterie.methods.pfeb import PFEB
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.models.linear import head_of
from coterie.planning.plan import Plan
from coterie.planning.rules import resolve
from coterie.privacy.entropy import open_entropy
from coterie.privacy.noise import GaussianNoise, LocalNoise

Array = NDArray[np.float64]
FOUND = 0.1
"""The error below which a row counts as found."""
_STEPS = 300
_STARTS, _FEWEST_STARTS, _WORK = 8, 2, 200_000
_MOST_ROWS = 32
_PENALTY, _VARIATION = 1e-3, 1e-3
_MEASURED = 10_000


@dataclass(frozen=True)
class Setting:
    """What the attack reached in one setting.

    Attributes:
        name: "trusted", "secure_aggregation", "client_noise", or "guess" for the mean row.
        clients: How many contributions are in what the server received.
        noise: Standard deviation of the noise of a message, in units of the clip; 0 for none.
        errors: The error of each row of each attacked client.
        cosines: The largest |cosine| of a found row with a row of the client, less the mean row.
        mean_cosines: That with the mean of the client's rows.
    """

    name: str
    clients: int
    noise: float
    errors: tuple[Array, ...]
    cosines: Array
    mean_cosines: Array

    @property
    def error(self) -> float:
        """The median error of a row."""
        return float(np.median(np.concatenate(self.errors)))

    @property
    def found(self) -> float:
        """The share of rows with an error below 0.1."""
        return float((np.concatenate(self.errors) < FOUND).mean())

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        return {
            "clients_in_message": self.clients,
            "noise": self.noise,
            "error": self.error,
            "found": self.found,
            "best_cosine": float(np.median(self.cosines)),
            "mean_cosine": float(np.median(self.mean_cosines)),
            "errors": [one.tolist() for one in self.errors],
        }


@dataclass(frozen=True)
class Reconstructed:
    """What a server could reconstruct.

    Attributes:
        clients: The names of the attacked clients: those with the fewest rows.
        rows: Their numbers of rows.
        rounds: How many rounds the server uses.
        closed_form: Whether rows follow from the contribution without a search.
        local_steps: The most local steps, which a search takes for one; None for a solution of the
            local problem in closed form, which it takes for one step too.
        settings: The result in each setting, and of the mean row as a guess.
        left_out: Why the clients' own noise is left out; "" if it is not.
    """

    method: str
    model: str
    epsilon: float
    clients: tuple[str, ...]
    rows: tuple[int, ...]
    rounds: int
    closed_form: bool
    local_steps: int | None
    settings: tuple[Setting, ...]
    left_out: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            "attack": "reconstruction",
            **found,
            "epsilon": None if math.isinf(self.epsilon) else self.epsilon,
            "settings": {one.name: one.to_json() for one in self.settings},
        }


@dataclass(frozen=True)
class Known:
    """What the attacker knows of all rows: the mean row, and the mean of |row - mean row|^2."""

    mean: Array
    spread: float

    @classmethod
    def of(cls, data: FederatedDataset) -> "Known":
        """Measure it on the first rows of the data."""
        rows: Any = data.features[:_MEASURED]
        dense = rows.flatten(1).double().numpy() if isinstance(rows, Tensor) else rows.toarray()
        mean = dense.mean(axis=0)
        return cls(mean, max(float(((dense - mean) ** 2).sum(axis=1).mean()), 1e-300))

    @property
    def deviation(self) -> float:
        """The standard deviation of a number of a row."""
        return math.sqrt(self.spread / len(self.mean))


def score(
    found: Array, true: Array, known: Known, *, sized: bool = True
) -> tuple[Array, float, float]:
    """Return the error of each true row, and the largest |cosines| with rows and with their mean.

    Rows are matched by the Hungarian method; a true row without a match is guessed by the mean row.
    Where only directions are found (`sized` is False), each has its best scale.

    >>> score(np.eye(2)[::-1], np.eye(2), Known(np.zeros(2), 1.0))[0].tolist()
    [0.0, 0.0]
    """
    apart = ((true[:, None] - found[None]) ** 2).sum(axis=2) / known.spread
    if not sized:
        along = true @ _units(found).T
        apart = ((true**2).sum(axis=1)[:, None] - along**2).clip(min=0) / known.spread
    apart = np.nan_to_num(apart, nan=1e12, posinf=1e12).clip(max=1e12)
    errors = ((true - known.mean) ** 2).sum(axis=1) / known.spread
    at, by = linear_sum_assignment(apart)
    errors[at] = apart[at, by]
    if not len(found):
        return errors, 0.0, 0.0
    ours, own = _units(found - known.mean), true - known.mean
    cosines = np.abs(ours @ _units(own).T), np.abs(ours @ _units(own.mean(axis=0)[None]).T)
    return errors, float(cosines[0].max()), float(cosines[1].max())


def _units(rows: Array) -> Array:
    scaled: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    return scaled


def reconstruct(
    plan: Plan,
    data: FederatedDataset,
    *,
    clients: int = 5,
    seed: int = 0,
    steps: int = _STEPS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Reconstructed:
    """Return how well a curious server reconstructs rows of clients in three settings.

    Args:
        plan: What clients contribute to; open values are filled in by rule.
        data: The rows.
        clients: How many clients are attacked: those with the fewest rows.
        seed: Of local steps, noise and starts of the attack.
        steps: Of the optimiser.
        progress: Called after every attack with how many are done.
    """
    started, spec = time.perf_counter(), data.spec
    if clients < 1:
        raise ValueError(f"clients = {clients}: expected at least one client to attack")
    plan = replace(resolve(plan, spec), simulation_seed=seed)
    kind = SVMAttack if plan.method.kind == "mtlsvm" else GradientAttack
    known = Known.of(data)
    attack = kind(plan, data, _fewest_rows(data, clients), known, seed, steps)
    true = [_rows_of(data, client) for client in attack.targets]
    epsilon = plan.guarantee(spec.clients).epsilon if plan.private else math.inf
    plans, left_out = _plans(plan, spec.clients, epsilon)
    settings: list[Setting] = []
    for name, used in plans.items():
        scored = []
        for found, own in zip(attack.rows(name, used), true, strict=True):
            scored.append(score(found, own, known, sized=attack.sized))
            progress(len(settings) * len(true) + len(scored), len(plans) * len(true))
        settings.append(_setting(name, used, scored, spec.clients, len(attack.cohort)))
    guesses = tuple(score(np.empty((0, len(known.mean))), own, known)[0] for own in true)
    nothing = np.zeros(len(true))
    settings.append(Setting("guess", 0, 0.0, guesses, nothing, nothing))
    return Reconstructed(
        method=str(plan.method),
        model=plan.method.model.kind,
        epsilon=epsilon,
        clients=tuple(str(data.names[client]) for client in attack.targets),
        rows=tuple(len(own) for own in true),
        rounds=attack.rounds,
        closed_form=attack.closed_form,
        local_steps=attack.local_steps,
        settings=tuple(settings),
        left_out=left_out,
        seconds=time.perf_counter() - started,
    )


def _fewest_rows(data: FederatedDataset, clients: int) -> Ids:
    """Return the clients with the fewest rows, which are the most exposed."""
    order = np.argsort(data.counts, kind="stable")
    chosen: Ids = order[data.counts[order] > 0][:clients]
    if not len(chosen):
        raise ValueError(f"{data.title}: no client has rows to reconstruct")
    return chosen


def _plans(plan: Plan, clients: int, epsilon: float) -> tuple[dict[str, Plan], str]:
    """Return the plan of each setting, and why the clients' own noise is left out, if it is."""
    privacy, central = plan.privacy, plan
    if privacy.noise.local:
        central = replace(plan, privacy=replace(privacy, noise=GaussianNoise()))
    plans = {"trusted": central, "secure_aggregation": central}
    if epsilon == math.inf:
        return plans, "the plan has no budget (epsilon = inf)"
    if not privacy.noise.local:
        local = replace(
            privacy,
            epsilon=epsilon,
            noise_multiplier=None,
            delta=privacy.delta or None,
            noise=LocalNoise(),
        )
        plan = replace(plan, privacy=local)
    try:
        plan.mechanisms(clients)
    except ValueError as error:
        return plans, str(error)
    return {**plans, "client_noise": plan}, ""


def _setting(
    name: str, plan: Plan, scored: list[tuple[Array, float, float]], clients: int, cohort: int
) -> Setting:
    errors, cosines, means = zip(*scored, strict=True)
    mechanism = plan.mechanisms(clients)[0]
    return Setting(
        name=name,
        clients=cohort if name == "secure_aggregation" else 1,
        noise=mechanism.of_message().noise_over_bound if mechanism.local else 0.0,
        errors=errors,
        cosines=np.array(cosines),
        mean_cosines=np.array(means),
    )


def _rows_of(data: FederatedDataset, client: int) -> Array:
    """Return a client's rows, flat."""
    one = data.clients(np.array([client]))
    rows: Array = one.x[0].flatten(1).double().numpy()
    return rows


class SVMAttack:
    """The attack on MTL-SVM: messages of all rounds.

    Attributes:
        cohort: The clients in a sum.
        sized: Whether rows are found with their sizes and signs; only directions without a bias.
    """

    closed_form, local_steps = False, 1

    def __init__(
        self, plan: Plan, data: FederatedDataset, targets: Ids, known: Known, seed: int, steps: int
    ) -> None:
        self.data, self.targets, self.seed = data, targets, seed
        self.cohort, self.rounds = np.arange(data.spec.clients), plan.posts
        assert isinstance(plan.method.model, Linear)
        self.sized = plan.method.model.bias

    def rows(self, name: str, plan: Plan) -> Iterator[Array]:
        """Yield the rows found of each attacked client."""
        features = self.data.spec.features
        positive = features if self.sized else None
        seen = "sum" if name == "secure_aggregation" else "server"
        for client in self.targets:
            view = record(plan, self.data, int(client))[seen]
            found = svm.reconstruct(view, positive=positive, seed=self.seed)[0]
            if self.sized:  # the column of the bias is 1
                found = found / np.maximum(found[:, features:], 1e-9)
            yield found[:, :features]


class GradientAttack:
    """The attack on changes of a model: contributions to the first round; see `SVMAttack`."""

    rounds = 1

    def __init__(
        self, plan: Plan, data: FederatedDataset, targets: Ids, known: Known, seed: int, steps: int
    ) -> None:
        method, spec, rng = plan.method, data.spec, Rng.seeded(seed).at("init")
        self.method, self.shared = method, method.init(spec, rng)
        self.start = dict(method.model.init(spec, rng))
        leaves = _changed_leaves(method, self.shared, self.start, spec)
        self.data, self.targets, self.known = data, targets, known
        self.seed, self.steps = seed, steps
        drawn = plan.sampler.draw(spec.clients, open_entropy(seed, "cohort", 0))
        self.cohort = np.union1d(drawn, targets)
        self.first = next(iter(self.start))
        self.dense = self.first in leaves and self.start[self.first].shape[1:] == (spec.features,)
        self.closed_form = self.dense and int(data.counts[targets].max()) == 1
        self.sized = not self.closed_form or len(leaves) > 1
        self.local_steps = _local_steps(getattr(method, "base", method), data, targets)

    def rows(self, name: str, plan: Plan) -> Iterator[Array]:
        """Yield the rows found of each attacked client."""
        summed = self._received(plan, self.cohort) if name == "secure_aggregation" else None
        for client in self.targets:
            total = self._received(plan, np.array([client])) if summed is None else summed
            if self.method.shape is Shape.ROWS:  # each client has a row of its own in a sum
                total = {leaf: value[int(client)] for leaf, value in total.items()}
            yield self._invert(_as_update(self.method, self.shared, total), int(client))

    def _received(self, plan: Plan, ids: Ids) -> Tree:
        """Return the sum of these clients' contributions, as a server receives it."""
        mechanism = plan.mechanisms(self.data.spec.clients)[0]
        rng = Rng.seeded(self.seed)
        state = RoundState(self.method, mechanism, self.shared, rng, 0, self.seed)
        parts = []
        for block in self.data.blocks(ids, plan.speed.clients(self.shared)):
            own = self.method.init_client_state(self.shared, self.data.spec, len(block))
            parts.append(client_half(state, own, block).part)
        return functools.reduce(operator.add, parts).total

    def _invert(self, update: Tree, client: int) -> Array:
        """Return rows that lead to this update."""
        one, spec, model = self.data.clients(np.array([client])), self.data.spec, self.method.model
        count = min(int(one.counts[0]), _MOST_ROWS)
        weight = update[self.first].double() if self.dense else torch.empty(0, spec.features)
        bias = update.get(self.first.removesuffix("weight") + "bias") if self.dense else None
        if self.dense and count == 1 and (self.closed_form or bias is not None):
            return one_row(weight, bias)
        labels = _labels(one.y[0, :count], update, spec, model)
        rng = Rng.seeded(self.seed).at("reconstruction", client)
        many = int(np.clip(_WORK // (size(self.start) * count), _FEWEST_STARTS, _STARTS))
        starts = draw_starts(self.known, count, weight, bias, rng, many)
        problem = Matching(model, spec, self.start, update, labels, self.known)
        return problem.solve(starts, self.steps)


def _local_steps(method: Method, data: FederatedDataset, targets: Ids) -> int | None:
    """Return the most local steps of a client; None for solutions in closed form."""
    if not isinstance(method, Proximal):
        return None
    if not isinstance(method, Ditto) and method.problem().is_exact(data.spec):
        return None  # Ditto solves for what it does not contribute
    return int(method.sgd.count_steps(data.counts[targets]).max())


def _changed_leaves(method: Method, shared: Tree, start: Tree, spec: Spec) -> Tree:
    """Return the leaves of the model that a client changes; raise ValueError if there are none."""
    leaves: Tree = {}
    if method.shape in (Shape.SUM, Shape.ROWS):
        with suppress(RuntimeError):  # a slice has fewer weights
            leaves = _as_update(method, shared, method.contribution(spec))
    fits = all(name in start and leaf.shape == start[name].shape for name, leaf in leaves.items())
    if not leaves or not fits:
        raise ValueError(
            f"no reconstruction attack for {method} with these settings: a contribution is not a "
            f"change of a whole model (it releases {about(method.kind).releases}); try pmtl, "
            "fedavg, dpfedmtl, pfeb or mtlsvm"
        )
    return leaves


def _as_update(method: Method, shared: Tree, total: Tree) -> Tree:
    """Return a contribution as a change of the model.

    That of pfeb is the change of each weight over its prior standard deviation.
    """
    if not isinstance(method, PFEB):
        return total
    assert isinstance(method.model, Linear)
    spread = shared["variances"].sqrt()
    return head_of(total["mean"].reshape(spread.shape) / spread, method.model.bias)


def one_row(weight: Tensor, bias: Tensor | None) -> Array:
    """Return the row, (1, d), whose multiples the changes of units are; a direction without bias.

    >>> one_row(torch.tensor([[2.0, 4.0], [1.0, 2.0]]), torch.tensor([2.0, 1.0])).tolist()
    [[1.0, 2.0]]
    """
    weight = weight.double()
    if bias is None:
        return np.asarray(torch.linalg.svd(weight, full_matrices=False)[2][:1])
    bias = bias.double()
    return np.asarray((bias @ weight / (bias @ bias).clamp_min(1e-300))[None])


def draw_starts(
    known: Known, count: int, weight: Tensor, bias: Tensor | None, rng: Rng, many: int = _STARTS
) -> Tensor:
    """Return starts of the search, (starts, count, d); the last has ratios of units, if any.

    Of the ratios that are near enough to the mean row, those that differ most are taken.
    """
    drawn = torch.randn(many, count, len(known.mean), generator=rng.torch()).double()
    sizes = torch.linspace(0.1, 1.0, many, dtype=torch.float64)[:, None, None]
    starts = torch.from_numpy(known.mean) + known.deviation * sizes * drawn
    if bias is None:
        return starts
    active = bias.abs() > 1e-6 * bias.abs().max()
    ratios = (weight[active] / bias[active, None]).double().numpy()
    ratios = ratios[((ratios - known.mean) ** 2).sum(axis=1) < 9 * known.spread]
    for place in range(min(count, len(ratios))):
        taken = starts[-1, :place].numpy() if place else known.mean[None]
        apart = ((ratios[:, None] - taken[None]) ** 2).sum(axis=2).min(axis=1)
        starts[-1, place] = torch.from_numpy(ratios[int(np.argmax(apart))])
    return starts


def _labels(true: Tensor, update: Tree, spec: Spec, model: Model) -> Tensor:
    """Return the targets: of one row the class whose bias rises (iDLG), else the true ones."""
    biases = [name for name in model.head(spec) if name in update and update[name].dim() == 1]
    if len(true) > 1 or spec.task != "multiclass" or not biases:
        return true
    return update[biases[-1]].argmax().reshape(1).to(true)


@dataclass(frozen=True)
class Matching:
    """The search for rows whose gradient points against an update of the model."""

    model: Model
    spec: Spec
    start: Tree
    update: Tree
    labels: Tensor
    known: Known

    def solve(self, starts: Tensor, steps: int) -> Array:
        """Return the rows, (n, d), with the least loss over all starts and steps of Adam."""
        mean = torch.from_numpy(self.known.mean)
        # In units of the rows' deviation from the mean row.
        moved = ((starts - mean) / self.known.deviation).float().requires_grad_()
        optimiser = torch.optim.Adam([moved], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        best, least = moved.detach().clone(), torch.full((len(starts),), math.inf)
        for _ in range(steps):
            losses = self._losses(moved * self.known.deviation + mean.float(), moved)
            better = losses.detach() < least
            least = torch.where(better, losses.detach(), least)
            best[better] = moved.detach()[better]
            moved.grad = torch.nan_to_num(self._slope(losses, moved))
            optimiser.step()
            schedule.step()
        return np.asarray(best[int(least.argmin())].double() * self.known.deviation + mean)

    def _slope(self, losses: Tensor, moved: Tensor) -> Tensor:
        try:
            return torch.autograd.grad(losses.sum(), moved)[0]
        except RuntimeError as error:
            raise ValueError(
                f"model {self.model.kind}: its gradient cannot be differentiated by the rows "
                f"({error}); attack a linear model, mlp or cnn"
            ) from error

    def _losses(self, rows: Tensor, moved: Tensor) -> Tensor:
        """Return 1 - cosine of every start's gradient and the update, and the penalties."""
        images = rows.reshape(*rows.shape[:2], *self.spec.shape)
        trained = {name: self.start[name] for name in self.update}
        held = {name: leaf for name, leaf in self.start.items() if name not in trained}

        def loss(params: Tree, x: Tensor) -> Tensor:
            outputs = self.model.apply({**held, **params}, x)
            return self.model.losses(self.spec.task, outputs, self.labels).mean()

        slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(trained, images)
        flat = torch.cat([slopes[name].flatten(1) for name in self.update], dim=1)
        wanted = torch.cat([leaf.flatten() for leaf in self.update.values()]).to(flat)
        cosine = torch.nn.functional.cosine_similarity(flat, -wanted[None], dim=1, eps=1e-30)
        if not cosine.requires_grad:
            raise ValueError(
                f"model {self.model.kind}: it looks rows up in a table, and has no gradient by "
                "them; attack a linear model, mlp or cnn"
            )
        penalty = _PENALTY * moved.square().mean(dim=(1, 2))
        if len(self.spec.shape) > 1:
            shifts = [images.diff(dim=side).abs().flatten(1).mean(dim=1) for side in (-1, -2)]
            penalty = penalty + _VARIATION * (shifts[0] + shifts[1]) / self.known.deviation
        return 1 - cosine + penalty
