"""MTL-SVM: federated multi-task support vector machines, for classes and for numbers.

Ponomarenko-Timofeev, Galinina, Balakrishnan, Himayat, Andreev, Koucheryavy, "Multi-Task Model
Personalization for Federated Supervised SVM in Heterogeneous Networks". Client k decides by
(w + v_k) . x, w shared and v_k its own:

    min  1/2 |w|^2 + C2/2 sum_k |v_k|^2 + C1 sum_ik loss(y_ik, (w + v_k) . x_ik)

with the hinge loss, or |.| beyond a tube. In dual variables b_ik (y times a number in [0, C1]; or a
number in [-C1, C1]) w = sum_k a_k and v_k = a_k / C2, a_k = sum_i b_ik x_ik. C2 -> infinity is one
machine for all; C2 -> 0 with C1 / C2 held fixed gives machines of each client's own, with the
constant C1 / C2.

The steps are not the published ones, of which several do not solve this problem (ADR 17;
`MTLSVM.published` runs those). The dual is minimised coordinate by coordinate with its box and soft
threshold (`solvers.sdca`), and clients work side by side safely (Ma et al. 2015, "Adding vs.
averaging in distributed primal-dual optimization"). A client minimises over its own change d

    w . A_k d + sigma/2 |A_k d|^2 + (its own terms at b_k + d),      sigma = gamma K

and adds gamma d, where K is the most clients that a round may have. By |sum_k A_k d_k|^2 <= K sum_k
|A_k d_k|^2 the dual objective never increases, whichever clients answer and however far each gets.
gamma = 1 adds, gamma = 1 / K averages.

A client sends gamma A_k d only, once per round. Where the clip cuts it by a factor,
`on_clipped` takes the same part of the step of b_k and v_k, so that a_k is always what was released
of the client, and b_k stays in its box (a convex combination). Noise xi on the sum makes w = xi +
sum_k a_k: the problem is then solved with 1/2 |w - xi|^2 for 1/2 |w|^2, a random centre. That is
why few rounds with much local work suit a budget: if clients were alike, one round would reach the
optimum.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add, map_leaves, size, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import find_zero_rows, one_class_clients
from coterie.methods.base import (
    Baselines,
    Clipping,
    Duality,
    Method,
    Notes,
    Post,
    Rounds,
    Shape,
    check_numbers,
    register,
)
from coterie.methods.svm import ClassWeight, Machines, joined, kept_part, padded, parted
from coterie.models import Linear, Model
from coterie.solvers.sdca import Losses, certify, take_steps

if TYPE_CHECKING:
    from coterie.planning.plan import Plan

_LAST_EPOCHS = 200
_LOCAL_TOL = 1e-4  # the largest gradient at which local steps stop before their epochs are over
_LAST_TOL = 1e-6
_LARGEST = 3.0  # the norm that the shared weights may reach at the usual clip
_DIVERGED = 1e9  # the norm at which published steps have diverged: they only grow from there


@register("mtlsvm", releases="a noised sum of dual steps")
@dataclass(frozen=True, kw_only=True)
class MTLSVM(Machines):
    """Support vector machines with a shared and a personal part.

    Attributes:
        c1: The cost of errors.
        c2: What being different costs; the larger, the more alike.
        tube: Errors up to this are free (regression).
        class_weight: "none", "balanced" (by each client's own counts), or a weight per class.
        epochs: Local passes over own rows in a round, at most.
        gamma: "add" (1), "average" (one over the largest cohort), or a number between.
        together: The most clients that a round may have; None takes all, or a fixed cohort's size.
        stop: The relative duality gap at which a run without privacy is done.
        last_solve: After the last round each client solves for v_k once more, w held fixed.
        shrink: Before that, take off w what noise explains: a client is then at least about
            as well off as with local training, however small the budget.
        mask: "none"; "step" makes the mask a dual step size, which keeps the solution; "paper"
            masks what is sent and not the duals, as published, and ends at a random point. A mask
            is not differential privacy.
        mask_law: "bernoulli" or "beta".
        mask_keep: Of "bernoulli": the probability that a row's step is kept in a round.
        mask_beta: Of "beta": its two parameters.
        mask_untouched: The share of rows, drawn anew each round, that no mask touches.
        steps: "safe", or "published": one pass per round of the paper's steps (13) and (14), or
            (27) for regression, without a box, while all changes are added as they are. They solve
            another problem, or diverge; a run without privacy then stops, and states it.
        update: "add" the sum of the changes to w, or "replace" w by it (the paper's line 15).
    """

    shape = Shape.SUM
    model: Model = field(default_factory=Linear)
    c1: float = 1.0
    c2: float = 10.0
    tube: float = 0.1
    class_weight: ClassWeight = "none"
    epochs: int = 20
    gamma: Literal["add", "average"] | float = "add"
    together: int | None = None
    stop: float = 1e-3
    last_solve: bool = True
    shrink: bool = True
    mask: Literal["none", "step", "paper"] = "none"
    mask_law: Literal["bernoulli", "beta"] = "bernoulli"
    mask_keep: float = 0.5
    mask_beta: tuple[float, float] = (2.0, 0.5)
    mask_untouched: float = 0.0
    steps: Literal["safe", "published"] = "safe"
    update: Literal["add", "replace"] = "add"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, c1="> 0", c2="> 0", stop="> 0")
        self._check_published()
        self.losses()
        for name in ("epochs", "together"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} = {value}: expected a whole number of at least 1")
        number = type(self.gamma) in (int, float) and 0 < float(self.gamma) <= 1
        if self.gamma not in ("add", "average") and not number:
            raise ValueError(
                f"gamma = {self.gamma!r}: expected 'add', 'average' or a number in (0, 1]"
            )
        self._check_mask()

    @classmethod
    def published(
        cls, *, rounds: int = 100, update: Literal["add", "replace"] = "replace", **settings: Any
    ) -> "Plan":
        """Return the plan of the paper's Algorithm 1: a reproduction that may diverge.

        Without noise, as in the paper, so nothing is guaranteed. C1 has no effect on the published
        steps, which have no box. `update = "add"` mends line 15 alone; `settings` are those of the
        method, such as c2, tube and masks (`mask = "paper"`).
        """
        from coterie.planning.plan import Plan, Privacy

        usual: dict[str, Any] = {"model": Linear(bias=False), "last_solve": False}
        method = cls(steps="published", update=update, **{**usual, **settings})
        return Plan(method=method, privacy=Privacy(epsilon=math.inf), rounds=rounds)

    def _check_published(self) -> None:
        for name, choices in (("steps", "safe, published"), ("update", "add, replace")):
            if getattr(self, name) not in choices.split(", "):
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected one of {choices}")
        if self.update == "replace" and self.steps != "published":
            raise ValueError('update = "replace" is for steps = "published": use "add"')
        if self.steps == "published" and self.mask == "step":
            raise ValueError('mask = "step" is for safe steps: use "paper", or "none"')

    def _check_mask(self) -> None:
        for name, choices in (("mask", "none, step, paper"), ("mask_law", "bernoulli, beta")):
            if getattr(self, name) not in choices.split(", "):
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected one of {choices}")
        if self.mask_law == "bernoulli" and self.mask_keep == 0 and self.mask_untouched == 0:
            raise ValueError(
                "mask_keep = 0 and mask_untouched = 0: no step would ever be taken; keep some"
            )
        for name in ("mask_keep", "mask_untouched"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected a number in [0, 1]")
        if len(self.mask_beta) != 2 or not all(0 < number < math.inf for number in self.mask_beta):
            raise ValueError(f"mask_beta = {self.mask_beta}: expected two positive numbers")

    def losses(self) -> Losses:
        """Return what rows cost."""
        return Losses(c1=self.c1, tube=self.tube, class_weight=self.class_weight)

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule for rounds.

        There is no duality gap under the published mask: w is then not the sum of own sums.
        """
        published = self.steps == "published"
        paper = published or self.mask == "paper"
        gap = None if paper else Duality(self.stop, self._certify, _norm)
        return replace(
            super().rounds(spec),
            between=(1, 5),
            without_noise=1000,
            passes=1 if published else self.epochs,
            duality=gap,
            diverged=_why_diverged if published else None,
        )

    def check(self, spec: Spec, *, cohort: int | None = None, **given: Any) -> None:
        """Raise ValueError for other models, and for cohorts larger than the steps are safe for."""
        super().check(spec, cohort=cohort, **given)
        if self.steps == "published" and spec.task == "regression" and self.c2 == 1:
            raise ValueError(
                "c2 = 1: the published step (27) divides by (1/C2 - 1) |x|^2 = 0; choose another "
                'c2, or steps = "safe"'
            )
        if self.together is not None and cohort is not None and self.together < cohort:
            raise ValueError(
                f"together = {self.together}, but a round may have {cohort} clients: steps made "
                "for fewer may overshoot; leave it out, or draw cohorts of that size"
            )

    def resolve(self, spec: Spec, *, n_mu: float, cohort: int) -> Method:
        """Take the largest cohort from the plan."""
        return replace(self, together=cohort) if self.together is None else self

    def clipping(self, clients: int, rounds: int, clip: float | None = None) -> Clipping:
        """Return the bound; by default 3 / (clients rounds), so that w can have norm 3.

        At a margin of 1 the norm of w is about one over the standard deviation of the rows along
        it, so this suits features of standard deviation about 1.
        """
        return Clipping(clip=_LARGEST / (clients * rounds) if clip is None else clip)

    def notes(
        self,
        *,
        private: bool = True,
        rounds: int = 1,
        clip: float = 1.0,
        data: FederatedDataset | None = None,
    ) -> Notes:
        """Return why there are few rounds, rows without effect, and what a mask is not."""
        return Notes(
            settings=(
                f"{rounds} round{'s' * (rounds > 1)} of up to {self.epochs} local passes, clip "
                f"{clip:.3g}: the noise of every round stays in the shared weights, so few rounds "
                "with much local work are best. The clip suits features of standard deviation "
                "about 1.",
            ),
            data=() if data is None else tuple(self._data_notes(data)),
            caveats=(*self._as_published(private), *self._mask_caveats(private)),
        )

    def _data_notes(self, data: FederatedDataset) -> Iterator[str]:
        assert isinstance(self.model, Linear)
        zero = 0 if self.model.bias else len(find_zero_rows(data))
        if zero:
            yield f"{zero} rows are all zeros and are left out: no step can change them"
        if data.spec.task in ("binary", "multiclass") and len(found := one_class_clients(data)):
            who = "1 client has" if len(found) == 1 else f"{len(found)} clients have"
            yield f"{who} rows of one class only"

    def _as_published(self, private: bool) -> tuple[str, ...]:
        if self.steps != "published":
            return ()
        kind = "" if private else "; not a guarantee: nothing is noised"
        return (f"As published{kind}. The steps have no box, and the run may diverge.",)

    def _mask_caveats(self, private: bool) -> tuple[str, ...]:
        if self.mask == "none":
            return ()
        if private:
            return ("The mask adds nothing to the guarantee, which comes from the noise.",)
        return (
            "The mask is NOT differential privacy: a contribution still lies in the span of the "
            "client's rows, and no epsilon holds for it. Only a private run protects clients.",
        )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from zeros, in float64: w is a sum over all rounds; no noise is in it yet."""
        self.check(spec)
        start = map_leaves(torch.Tensor.double, self.model.init(spec, rng))
        return {**start, "noise": torch.zeros((), dtype=torch.float64)}

    def contribution(self, spec: Spec) -> Tree:
        """Contribute a change of w."""
        return _weights(self.init(spec, Rng.seeded(0)))

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Start with v = 0 and no dual steps taken."""
        own = map_leaves(lambda leaf: leaf.new_zeros(clients, *leaf.shape), _weights(shared))
        return {**own, "dual": torch.zeros(clients, 0, spec.outputs, dtype=torch.float64)}

    def _pace(self, spec: Spec) -> tuple[float, float]:
        """Return gamma and sigma = gamma K."""
        most = self.together or spec.clients
        if self.gamma == "add":
            return 1.0, float(most)
        if self.gamma == "average":
            return 1.0 / most, 1.0
        assert isinstance(self.gamma, int | float)
        return self.gamma, max(1.0, self.gamma * most)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Take safe dual steps; contribute what they add to the shared weights."""
        if self.steps == "published":
            return self._published_update(shared, personal, clients, rng)
        gamma, sigma = self._pace(clients.spec)
        own, before = joined(personal), padded(personal["dual"], clients.longest)
        mask = self._draw_mask(clients, before.shape[1], rng)
        dual, moved = take_steps(
            clients,
            joined(shared).cpu() + own.cpu(),
            sigma + 1 / self.c2,
            before,
            self.losses(),
            keys=rng.at("order").keys(clients.ids),
            epochs=self.epochs,
            tol=_LOCAL_TOL,
            mask=mask,
            paper_mask=self.mask == "paper",
        )
        steps = dual.to(before.device) - before
        # As published, a mask touches what is sent and not the client's own.
        whole = moved if self.mask != "paper" else combine(clients, steps.cpu(), own.shape[-1])
        after = {
            **parted(own + gamma * whole.to(own.device) / self.c2, personal),
            "dual": before + gamma * steps,
        }
        return after, parted(gamma * moved.to(own.device), personal)

    def _published_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng
    ) -> tuple[Tree, Tree]:
        """Take the published steps, one pass in random order; a mask touches what is sent."""
        centre, own = joined(shared).cpu().double(), joined(personal).cpu().double()
        before = padded(personal["dual"], clients.longest).cpu().double()
        after, orders = before.clone(), rng.at("order").keys(clients.ids)
        for place, (rows, targets) in enumerate(self._published_rows(clients, own.shape[-1])):
            stream = np.random.Generator(np.random.Philox(key=int(orders[place])))
            for output in range(own.shape[1]):
                after[place, : len(rows), output] = torch.from_numpy(
                    self._published_pass(
                        (rows, targets[:, output], stream.permutation(len(rows))),
                        centre[output].numpy(),
                        own[place, output].numpy(),
                        after[place, : len(rows), output].numpy(),
                        regression=clients.spec.task == "regression",
                    )
                )
        steps = after - before
        mask = self._draw_mask(clients, before.shape[1], rng)
        sent = steps if mask is None else steps * mask[..., None]
        device, width = personal["dual"].device, own.shape[-1]
        whole, moved = (combine(clients, part, width).to(device) for part in (steps, sent))
        state = {**parted(own.to(device) + whole / self.c2, personal), "dual": after.to(device)}
        return state, parted(moved, personal)

    def _published_rows(
        self, clients: Clients, width: int
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Yield each client's rows, with a 1 behind for a bias, and its targets by output."""
        for start, count in zip(clients.starts.tolist(), clients.counts.tolist(), strict=True):
            part = clients.features[start : start + count]
            dense = part.flatten(1).cpu().numpy() if isinstance(part, Tensor) else part.toarray()
            rows = np.asarray(dense, dtype=np.float64)
            rows = np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=1.0)
            given = clients.targets[start : start + count].cpu()
            if clients.spec.task == "regression":
                yield rows, given.double().numpy().reshape(count, -1)
            elif clients.spec.task == "multiclass":
                one = torch.nn.functional.one_hot(given.long(), clients.spec.outputs)
                yield rows, 2.0 * one.double().numpy() - 1
            else:
                yield rows, 2.0 * given.double().numpy().reshape(count, -1) - 1

    def _published_pass(
        self,
        rows: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]],
        centre: NDArray[np.float64],
        own: NDArray[np.float64],
        dual: NDArray[np.float64],
        *,
        regression: bool,
    ) -> NDArray[np.float64]:
        """Return the duals after one pass over rows, targets and their order.

        With signed duals b = alpha y, steps (13) and (14) move b by (y - x.(w + v)) / ((1 + 1/C2)
        |x|^2). Step (27), printed for b = alpha^- - alpha^+, has the residual x.(v - w) - y and the
        denominator (1/C2 - 1) |x|^2. Neither has a box.
        """
        (x, y, order), dual = rows, dual.copy()
        shared = -1.0 if regression else 1.0
        tube, scale = (self.tube if regression else 0.0), shared + 1 / self.c2
        q, squares = shared * centre + own, np.square(x).sum(axis=1)
        with np.errstate(all="ignore"):  # overflow is how they diverge
            for i in order:
                a = scale * squares[i]
                if a == 0:
                    continue
                u = a * dual[i] - (x[i] @ q - y[i])
                new = np.sign(u) * max(abs(u) - tube, 0.0) / a
                q += scale * (new - dual[i]) * x[i]
                dual[i] = new
        return dual

    def on_clipped(self, before: Tree, after: Tree, kept: Tensor) -> Tree:
        """Take the part of the step that the clip kept, of b and v alike; none if none was sent."""
        start = {**before, "dual": padded(before["dual"], after["dual"].shape[1])}
        return map_leaves(lambda old, new: kept_part(old, new, kept), start, after)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Add the released sum, and note how large its noise is: a public number."""
        weights, posted = _weights(shared), to(post.value, shared["noise"].device)
        noise = size(weights) * post.deviation**2
        if self.update == "replace":
            return {**posted, "noise": torch.full_like(shared["noise"], noise)}
        return {**add(weights, posted), "noise": shared["noise"] + noise}

    def _centre(self, shared: Tree) -> Tensor:
        """Return w, shortened by what noise explains of it (James and Stein 1961).

        Zero where noise has that length once in about a thousand runs: the rest could still be
        many times as long as a model.
        """
        weights, noise = joined(shared), float(shared["noise"])
        square = float(weights.square().sum())
        if not self.shrink or noise == 0:
            return weights
        doubt = 1 + 3 * math.sqrt(2 / weights.numel())
        return weights * (0.0 if square <= doubt * noise else 1 - noise / square)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return w + v, after solving for v with w held fixed unless switched off."""
        if not self.last_solve:
            return self.current_models(shared, personal, clients)
        weights = self._centre(shared) + joined(personal)
        _, moved = take_steps(
            clients,
            weights.cpu(),
            1 / self.c2,
            personal["dual"],
            self.losses(),
            keys=rng.at("order").keys(clients.ids),
            epochs=_LAST_EPOCHS,
            tol=_LAST_TOL,
        )
        return parted((weights + moved.to(weights) / self.c2).float(), shared)

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return w + v."""
        return parted((joined(shared) + joined(personal)).float(), shared)

    def _certify(self, shared: Tree, personal: Tree, clients: Clients) -> Tensor:
        """Return C2/2 |v|^2 and the rows' losses, and each client's part of the duality gap."""
        own = joined(personal).cpu()
        costs, gaps = certify(clients, joined(shared).cpu() + own, personal["dual"], self.losses())
        ridge = self.c2 / 2 * own.square().flatten(1).sum(dim=1)
        return torch.stack([ridge + costs, gaps], dim=1)

    def baselines(self) -> Baselines:
        """Compare with local support vector machines, the limit C2 -> 0."""
        return Baselines(local=self.local_machine(self.c1 / self.c2))

    def step_rule(self, clients: int) -> dict[str, Any]:
        """Return the public rule of a client's dual steps, which an audit follows.

        They are those of `audit.svm.Rule`: no weights of classes, and all steps added.
        """
        if self.gamma != "add" or self.class_weight != "none":
            raise ValueError(
                f"gamma = {self.gamma!r}, class_weight = {self.class_weight!r}: expected 'add' and "
                "'none', the rule that the attack knows"
            )
        sigma = float(self.together or clients)
        return {"c1": self.c1, "c2": self.c2, "sigma": sigma, "mask": self.mask}

    def _draw_mask(self, clients: Clients, longest: int, rng: Rng) -> Tensor | None:
        """Draw each row's factor of this round from its client's own random stream."""
        if self.mask == "none":
            return None
        mask = np.ones((len(clients), longest))
        keys = rng.at("mask").keys(clients.ids)
        for place, (key, count) in enumerate(zip(keys, clients.counts.tolist(), strict=True)):
            stream = np.random.Generator(np.random.Philox(key=int(key)))
            drawn = (
                (stream.random(count) < self.mask_keep).astype(np.float64)
                if self.mask_law == "bernoulli"
                else stream.beta(*self.mask_beta, count)
            )
            untouched = stream.random(count) < self.mask_untouched
            mask[place, :count] = np.where(untouched, 1.0, drawn)
        return torch.from_numpy(mask)


def _weights(shared: Tree) -> Tree:
    return {name: leaf for name, leaf in shared.items() if name != "noise"}


def _why_diverged(shared: Tree) -> str:
    """Return that published steps have diverged, or ""."""
    norm = float(joined(shared).norm())
    if norm < _DIVERGED:
        return ""
    return f"the published steps diverged: the shared weights reached a norm of {norm:.2g}"


def _norm(shared: Tree) -> float:
    """Return 1/2 |w|^2, the shared part of the primal objective."""
    return 0.5 * float(joined(shared).square().sum())


def combine(clients: Clients, dual: Tensor, width: int) -> Tensor:
    """Return sum_i b_i x_i of each client, (c, outputs, width): with a 1 behind x for a bias.

    Client by client: no copy of all rows, and no client's bits depend on another's row count.
    """
    summed = np.zeros((len(clients), dual.shape[2], width))
    starts, counts = clients.starts.tolist(), clients.counts.tolist()
    for place, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own = dual[place, :count].numpy().T
        rows = clients.features[start : start + count]
        if isinstance(rows, Tensor):
            rows = rows.flatten(1).cpu().double().numpy()
        summed[place, :, : rows.shape[1]] = (rows.T @ own.T).T
        if width > rows.shape[1]:
            summed[place, :, -1] = own.sum(axis=1)
    return torch.from_numpy(summed)
