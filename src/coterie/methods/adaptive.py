"""Adaptive clipping: the clip follows a quantile of the clients' norms, for a share of epsilon.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping",
NeurIPS 2021. With C_t the clip of round t, a public number, a client with change d contributes

    change = d / C_t, clipped to norm 1          within = 1/2 if |d| <= C_t, else -1/2

and the server, with b the released mean of `within` plus 1/2, sets

    shared' = by the base method, of C_t times the released mean of `change`
    C_{t+1} = C_t exp(-rate / (1 + (s / 0.1)^2) (b - quantile))

s is the standard deviation of the noise in b, a public number: where b is mostly noise the clip
stays where it was, instead of taking a random walk (the paper has s = 0 there).

**Guarantee:** that of the plan's ledger, whatever the norms are. Both numbers are blocks of one
Gaussian release (`BlockSum`), of bounds 1 and 1/2, which hold after clipping for every C_t > 0;
`within` gets the share f of mu^2 and `change` the rest. In the paper's terms, with noise
multiplier z of the release: z_change = z / sqrt(1 - f), and sigma_b = z / (2 sqrt(f)), so that
z_change^-2 + (2 sigma_b)^-2 = z^-2 (its Theorem 1). Each round is charged once, and C_{t+1} is a
function of releases. Assumptions: those of `BlockSum`; the norm of a change, and `kept`, the
factor of its clip, stay with the client. Tests: tests/methods/test_adaptive.py and the contracts.
"""

import math
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, size
from coterie.data.federated import Clients, Spec
from coterie.methods.base import (
    Block,
    Clipping,
    Method,
    Notes,
    Post,
    Rounds,
    Serving,
    check_numbers,
    register,
)
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import like_its_base
from coterie.methods.proximal import Proximal

CLIP, MOVED = "adaptive:clip", "adaptive:moved"
"""The leaves of the shared tree that hold C_t, and the places of the leaves that are released."""
_FARTHEST = 1e6  # the clip stays within this factor of its start
_NOISY = 0.1  # noise in the released share of clients at which the clip moves half as far


class _Read(NamedTuple):
    """What a base method reads of a release."""

    mean: Tree


@register("adaptive", releases="as its base method, and how many clients are within the clip")
@like_its_base
@dataclass(frozen=True, kw_only=True)
class Adaptive(Method):
    """fedavg, pmtl or dpfedmtl with a clip that follows the norms (Andrew et al. 2021).

    Everything else is the base method's.

    Attributes:
        base: The method whose changes are clipped.
        quantile: The share of clients whose change is to be within the clip. The paper has 0.5;
            where noise moves the shared model, changes undo it, and a large clip adds more noise.
        start: The clip of the first round.
        rate: How fast the logarithm of the clip moves.
        share: The share of mu^2 for the number of clients within the clip.
    """

    base: Method = field(default_factory=FedAvg)
    quantile: float = 0.2
    start: float = 0.5
    rate: float = 0.2
    share: float = 0.05
    model: InitVar[Any] = None  # replaces the base method's

    def __post_init__(self, model: Any) -> None:
        if model is not None:
            base = replace(self.base, model=model)  # type: ignore[type-var]
            object.__setattr__(self, "base", base)
        if not isinstance(self.base, Proximal) or vars(self.base).get("clusters"):
            raise ValueError(
                f"adaptive clipping of {self.base}: it is for methods that release one mean change "
                "(fedavg, dpfedmtl, pmtl without clusters); name one of these, or give a number as "
                "the clip"
            )
        check_numbers(self, start="> 0", rate="> 0")
        for name in ("quantile", "share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: expected a number between 0 and 1"
                )

    def __str__(self) -> str:
        return f"{self.base}+adaptive"

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Return the base method's first shared tree, and the first clip."""
        first, names = self.base.init(spec, rng), self.base.contribution(spec)
        places = [float(place) for place, name in enumerate(first) if name in names]
        return {**first, CLIP: torch.tensor(self.start), MOVED: torch.tensor(places)}

    def contribution(self, spec: Spec) -> Tree:
        """Contribute the change as one vector, and whether it is within the clip."""
        numbers = size(self.base.contribution(spec))
        return {"change": torch.zeros(numbers), "within": torch.zeros(1)}

    def resolve(self, spec: Spec, *, n_mu: float, cohort: int) -> Method:
        """Resolve the base method."""
        return replace(self, base=self.base.resolve(spec, n_mu=n_mu, cohort=cohort), model=None)

    def rounds(self, spec: Spec) -> Rounds:
        """Return the base method's rule: one more number changes nothing."""
        return self.base.rounds(spec)

    def clipping(self, clients: int, rounds: int, clip: float | None = None) -> Clipping:
        """Return both bounds; a clip is in units of the one that adapts, usually 1."""
        usual = 1.0 if clip is None else clip
        blocks = Block("change", usual, 1 - self.share), Block("within", 0.5, self.share)
        return Clipping(clip=usual, blocks=blocks)

    def notes(self, **run: Any) -> Notes:
        """Return the base method's sentences, and what the clip costs."""
        found = self.base.notes(**run)
        told = (
            f"The clip starts at {self.start:g} and follows the norms, so that a share of "
            f"{self.quantile:g} of the clients is within it. Their noisy number is released every "
            f"round, for {self.share:g} of the budget."
        )
        return replace(found, settings=(*found.settings, told))

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Return the base method's."""
        return self.base.init_client_state(_without(shared), spec, clients)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Return the base method's change in units of the clip, and whether it is within it."""
        after, change = self.base.local_update(_without(shared), personal, clients, rng, round)
        rows = torch.cat([leaf.reshape(len(leaf), -1) for leaf in change.values()], dim=1)
        rows = rows.double() / shared[CLIP].double()
        inside = torch.where(rows.square().sum(dim=1) <= 1, 0.5, -0.5)  # NaN is not
        return after, {"change": rows, "within": inside[:, None]}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared tree by the released mean, and the clip towards the quantile."""
        mean, clip = post.mean, float(shared[CLIP])
        own = _without(shared)
        names = [list(own)[int(place)] for place in shared[MOVED]]
        parts = torch.split(mean["change"] * clip, [own[name].numel() for name in names])
        change = {n: part.reshape(own[n].shape) for n, part in zip(names, parts, strict=True)}
        after = self.base.server_update(own, _Read(change))  # type: ignore[arg-type]
        noise = post.deviations["within"] / post.cohort
        far = float(mean["within"]) + 0.5 - self.quantile
        step = self.rate / (1 + (noise / _NOISY) ** 2) * max(-1.0, min(1.0, far))
        moved = clip * math.exp(-step)
        moved = min(max(moved, self.start / _FARTHEST), self.start * _FARTHEST)
        return {**after, CLIP: torch.tensor(moved), MOVED: shared[MOVED]}

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return the base method's models."""
        return self.base.personalise(_without(shared), personal, clients, rng)

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return the base method's models."""
        return self.base.current_models(_without(shared), personal, clients)

    @property
    def serving(self) -> Serving:
        """What the base method's shared tree allows."""
        found = self.base.serving

        def shared_model(shared: Tree, clients: Clients) -> Tree:
            return found.shared_model(_without(shared), clients)

        return replace(found, shared_model=shared_model)


def _without(shared: Tree) -> Tree:
    """Return the base method's shared tree."""
    return {name: leaf for name, leaf in shared.items() if name not in (CLIP, MOVED)}
