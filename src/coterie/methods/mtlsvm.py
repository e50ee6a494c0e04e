"""MTL-SVM: federated multi-task support vector machines, for classes and for numbers.

Ponomarenko-Timofeev, Galinina, Balakrishnan, Himayat, Andreev, Koucheryavy, "Multi-Task Model
Personalization for Federated Supervised SVM in Heterogeneous Networks". Client k decides by
(w + v_k) . x, w shared and v_k its own:

    min  1/2 |w|^2 + C2/2 sum_k |v_k|^2 + C1 sum_ik loss(y_ik, (w + v_k) . x_ik)

with the hinge loss, or |.| beyond a tube. In dual variables b_ik (y times a number in [0, C1]; or a
number in [-C1, C1]) w = sum_k a_k and v_k = a_k / C2, a_k = sum_i b_ik x_ik. C2 -> infinity is one
machine for all; C2 -> 0 with C1 / C2 held fixed gives machines of each client's own, with the
constant C1 / C2.

The steps are not the printed ones, of which several do not solve this problem (ADR 17): the dual is
minimised coordinate by coordinate with its box and soft threshold (`solvers.sdca`), and clients
work side by side safely (Ma et al. 2015, "Adding vs. averaging in distributed primal-dual
optimization"). A client minimises over its own change d

    w . A_k d + sigma/2 |A_k d|^2 + (its own terms at b_k + d),      sigma = gamma K

and adds gamma d, where K is the most clients that a round may have. By |sum_k A_k d_k|^2 <= K sum_k
|A_k d_k|^2 the dual objective never increases, whoever answers and however far each gets. gamma = 1
adds, gamma = 1 / K averages.

What leaves a client is gamma A_k d alone, once a round. Where the clip cuts it by a factor,
`settle` takes the same part of the step of b_k and v_k, so that a_k is always what was posted of
the client, and b_k stays in its box (a convex combination). Noise xi on the sum makes w = xi +
sum_k a_k: the problem is then solved with 1/2 |w - xi|^2 for 1/2 |w|^2, a random centre. That is
why few rounds with much local work suit a budget: if clients were alike, one round would reach the
optimum.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import find_zero_rows, one_class_clients
from coterie.methods.base import Method, Post, Shape, register
from coterie.methods.localsvm import (
    LocalSVM,
    Machines,
    check_constants,
    joined,
    padded,
    parted,
    settled,
)
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.sdca import Losses, certify, take_steps
from coterie.tree import Tree, add, map_leaves, size, to

ClassWeight = Literal["none", "balanced"] | tuple[float, ...]
_LAST_EPOCHS = 200
_LOCAL_TOL = 1e-4  # the largest slope at which local steps stop before their epochs are over
_LAST_TOL = 1e-6
_LARGEST = 3.0  # the norm that the shared weights may reach at the usual clip


@register("mtlsvm")
@dataclass(frozen=True, kw_only=True)
class MTLSVM(Machines):
    """A shared and a personal support vector machine added up, with the shared one posted.

    Attributes:
        model: Linear; a bias is penalised like the weights.
        c1: What errors cost.
        c2: What being different costs; the larger, the more alike.
        tube: Errors up to this are free (regression).
        class_weight: "none", "balanced" (by each client's own counts), or a weight per class.
        epochs: Local passes over own rows in a round, at most.
        gamma: "add" (1), "average" (one over the most clients of a round), or a number between.
        together: The most clients that a round may have; None takes all, or a fixed cohort's size.
        stop: The relative duality gap at which a run without privacy is done.
        last_solve: After the last round each client solves for v_k once more, w held fixed.
        shrink: Before that, take off w what noise alone explains: a client is then at least about
            as well off as alone, however little a budget buys.
        mask: "none"; "step" makes the mask a dual step size, which keeps the solution; "paper"
            masks what is sent and not the duals, as printed, and ends at a random point. A mask is
            not differential privacy.
        mask_law: "bernoulli" or "beta".
        mask_keep: Of "bernoulli": the probability that a row's step is kept in a round.
        mask_beta: Of "beta": its two parameters.
        mask_untouched: The share of rows, drawn anew each round, that no mask touches.
    """

    shape = Shape.SUM
    per_row = ("dual",)
    rounds_between = (1, 5)
    rounds_without_noise = 1000
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

    def __post_init__(self) -> None:
        check_constants(c1=self.c1, c2=self.c2, stop=self.stop)
        self.losses()
        for name in ("epochs", "together"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} = {value}: expected a whole number of at least 1")
        number = isinstance(self.gamma, int | float) and not isinstance(self.gamma, bool)
        if self.gamma not in ("add", "average") and not (number and 0 < float(self.gamma) <= 1):
            raise ValueError(
                f"gamma = {self.gamma!r}: expected 'add', 'average' or a number in (0, 1]"
            )
        self._check_mask()

    def _check_mask(self) -> None:
        for name, choices in (
            ("mask", ("none", "step", "paper")),
            ("mask_law", ("bernoulli", "beta")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: expected one of {', '.join(choices)}"
                )
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

    @property
    def stop_gap(self) -> float | None:
        """The relative duality gap at which a run without privacy is done.

        None under the printed mask: w is then not the sum of own sums, and there is no such gap.
        """
        return None if self.mask == "paper" else self.stop

    @property
    def passes(self) -> int:
        """Passes over own rows in a round."""
        return self.epochs

    def check_cohort(self, largest: int, spec: Spec) -> None:
        """Refuse rounds of more clients than the steps are safe for."""
        if self.together is not None and self.together < largest:
            raise ValueError(
                f"together = {self.together}, but a round may have {largest} clients: steps made "
                "for fewer may overshoot; leave it out, or draw cohorts of that size"
            )

    def for_cohort(self, largest: int, spec: Spec) -> Method:
        """Take the most clients of a round from the plan."""
        return replace(self, together=largest) if self.together is None else self

    def usual_clip(self, clients: int, rounds: int) -> float:
        """Return 3 / (clients rounds): w adds up over both, and can then have norm 3.

        At a margin of 1 the norm of w is about one over the deviation of the rows along it, so this
        suits features of deviation about 1, whatever their number.
        """
        return _LARGEST / (clients * rounds)

    def explain(self, rounds: int, clip: float) -> tuple[str, ...]:
        """Say why there are few rounds, and what the clip allows."""
        rounded = f"{rounds} round{'s' * (rounds > 1)}"
        told = f"{rounded} of up to {self.epochs} local passes, clip {clip:.3g}"
        return (
            f"{told}: the noise of every round stays in the shared weights, so few rounds with "
            "much local work spend a budget best; the clip is made for features of deviation "
            "about 1.",
        )

    def notices(self, data: FederatedDataset) -> tuple[str, ...]:
        """Say which rows have no step, and who has rows of one class alone."""
        assert isinstance(self.model, Linear)
        told = []
        zero = 0 if self.model.bias else len(find_zero_rows(data))
        if zero:
            told.append(f"{zero} rows are all zeros and are left out: no step can change them")
        if data.spec.task in ("binary", "multiclass") and len(alone := one_class_clients(data)):
            told.append(f"{len(alone)} clients have rows of one class alone")
        return tuple(told)

    def caveats(self, private: bool) -> tuple[str, ...]:
        """Say what a mask is not."""
        if self.mask == "none":
            return ()
        if private:
            return ("The mask adds nothing to the guarantee, which the noise alone gives.",)
        return (
            "The mask is NOT differential privacy: what a client sends still lies in the span of "
            "its rows, and no epsilon holds for it. Only a run with a budget protects anybody.",
        )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from zeros, in float64: w is a sum over all rounds; no noise is in it yet."""
        self.check(spec)
        start = map_leaves(torch.Tensor.double, self.model.init(spec, rng))
        return {**start, "noise": torch.zeros((), dtype=torch.float64)}

    def contribution(self, shared: Tree) -> Tree:
        """Contribute a change of w."""
        return {name: leaf for name, leaf in shared.items() if name != "noise"}

    def enrol(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Start with v = 0 and no dual steps taken."""
        like = self.contribution(shared)
        own = map_leaves(lambda leaf: leaf.new_zeros(clients, *leaf.shape), like)
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
        # As printed, a mask touches what is sent and not the client's own.
        whole = moved if self.mask != "paper" else combine(clients, steps.cpu(), own.shape[-1])
        after = {
            **parted(own + gamma * whole.to(own.device) / self.c2, personal),
            "dual": before + gamma * steps,
        }
        return after, parted(gamma * moved.to(own.device), personal)

    def settle(self, before: Tree, after: Tree, kept: Tensor) -> Tree:
        """Take the part of the step that the clip kept, of b and v alike; none if none was sent."""
        start = {**before, "dual": padded(before["dual"], after["dual"].shape[1])}
        return map_leaves(lambda old, new: settled(old, new, kept), start, after)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Add the posted sum, and note how large its noise is: a public number."""
        weights = self.contribution(shared)
        moved = add(weights, to(post.value, shared["noise"].device))
        return {**moved, "noise": shared["noise"] + size(weights) * post.deviation**2}

    def _centre(self, shared: Tree) -> Tensor:
        """Return w, shortened by what noise alone explains of it (James and Stein 1961).

        All of it where noise alone is as long once in about a thousand runs: what would be left of
        it could still be many times as long as a model.
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
            return self.standing(shared, personal, clients)
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

    def standing(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return w + v."""
        return parted((joined(shared) + joined(personal)).float(), shared)

    def certify(self, shared: Tree, personal: Tree, clients: Clients) -> Tensor:
        """Return C2/2 |v|^2 and the rows' losses, and each client's part of the duality gap."""
        own = joined(personal).cpu()
        costs, gaps = certify(clients, joined(shared).cpu() + own, personal["dual"], self.losses())
        ridge = self.c2 / 2 * own.square().flatten(1).sum(dim=1)
        return torch.stack([ridge + costs, gaps], dim=1)

    def shared_cost(self, shared: Tree) -> float:
        """Return 1/2 |w|^2."""
        return 0.5 * float(joined(shared).square().sum())

    def alone(self) -> Method:
        """Return machines of each client's own, as C2 -> 0 does."""
        return LocalSVM(
            model=self.model,
            c=self.c1 / self.c2,
            tube=self.tube,
            class_weight=self.class_weight,
        )

    def _draw_mask(self, clients: Clients, longest: int, rng: Rng) -> Tensor | None:
        """Draw each row's factor of this round from its client's own coins."""
        if self.mask == "none":
            return None
        mask = np.ones((len(clients), longest))
        keys = rng.at("mask").keys(clients.ids)
        for place, (key, count) in enumerate(zip(keys, clients.counts.tolist(), strict=True)):
            coins = np.random.Generator(np.random.Philox(key=int(key)))
            drawn = (
                (coins.random(count) < self.mask_keep).astype(np.float64)
                if self.mask_law == "bernoulli"
                else coins.beta(*self.mask_beta, count)
            )
            untouched = coins.random(count) < self.mask_untouched
            mask[place, :count] = np.where(untouched, 1.0, drawn)
        return torch.from_numpy(mask)


def combine(clients: Clients, dual: Tensor, width: int) -> Tensor:
    """Return sum_i b_i x_i of each client, (c, outputs, width): with a 1 behind x for a bias.

    Client by client: no copy of all rows, and nobody's bits depend on a neighbour's row count.
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
