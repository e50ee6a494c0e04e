"""DPFedMTL: shared lower layers, personal heads; only the shared layers are ever contributed.

Wu, Chen, Wang, "A Theoretical Perspective on Differentially Private Federated Multi-Task Learning":

    min_{s, w_1..w_m}  (1/m) sum_k f_k(s, w_k),   f_k the mean loss over client k's rows

with s the shared layers (the encoder) and w_k the client's own (its head). In a round a client
takes s and its own head, trains both for H local steps, and contributes the change of s once:

    s' = s + sum_{k in cohort} clip(s_k - s) / (expected cohort) + noise

Heads never leave. The paper's noise and theorems are wrong (docs/methods/neural.md has the
numbers): noise of S = 2 C K / M on every local gradient of every client, no clipping in the
algorithm, K/M for 1/K in the sensitivity, T counted twice in Theorem 4.2. `DPFedMTL.published`
makes that plan, for comparison; with `every_step` each of the H local gradients gets its noise,
unclipped, and no finite epsilon holds. Without noise (epsilon = inf) the method is the paper's
FedMTL. Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning" (FedRep, 2021) first fit the head against the shared layers, then take steps on
these: `alternate`.

Privacy with heads: a head is a function of its client's rows and the releases, and stays there, so
it costs nothing in the view of others (billboard lemma).
"""

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add, stack
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Post, check_numbers, register
from coterie.methods.proximal import Proximal
from coterie.models import MLP, Model
from coterie.solvers.sgd import SGD

if TYPE_CHECKING:
    from coterie.planning.plan import Plan


@register("dpfedmtl", releases="a clipped, noised mean change of the shared layers")
@dataclass(frozen=True, kw_only=True)
class DPFedMTL(Proximal):
    """A network with shared layers and a personal head per client (Wu et al.).

    At most one of `personal`, `head`, `encoder` and `split` says what is whose; without any the
    last linear layer is personal.

    Attributes:
        model: The network; a model, a torch module, or what makes one.
        personal: Names of personal leaves or layers ("head", "layer2.bias", "conv*").
        head: The path of the personal part in a module; all else is shared.
        encoder: The path of the shared part in a module; all else is personal.
        split: A function of a leaf's name: True for personal.
        sgd: Local steps of a round, on both parts.
        alternate: First steps on the head only, then on the shared layers only (FedRep).
        head_epochs: Epochs on the head: of each round that alternates, and after the last round,
            when every client, sampled or not, fits its head to the final shared layers (free).
        last_solve: Whether there is that last fit.
        step_noise: As published: the standard deviation of noise that each client adds to every
            gradient of the shared layers in its `sgd.steps` local steps. It is part of training,
            and guarantees nothing: gradients are not clipped.
    """

    model: Model = field(default_factory=MLP)
    personal: tuple[str, ...] | str = ()
    head: str = ""
    encoder: str = ""
    split: Callable[[str], bool] | None = None
    sgd: SGD = field(default_factory=lambda: SGD(epochs=5))
    alternate: bool = False
    head_epochs: int = 5
    last_solve: bool = True
    step_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_noise and self.alternate:
            raise ValueError("step_noise and alternate: the published steps change both parts")
        if isinstance(self.personal, str):
            object.__setattr__(self, "personal", (self.personal,))
        if self.split is not None and not callable(self.split):
            raise ValueError(f"split = {self.split!r}: expected a function of a leaf's name")
        given = [name for name in ("personal", "head", "encoder", "split") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} were given: one of them says what is personal")
        check_numbers(self, head_epochs=">= 1")

    @classmethod
    def published(
        cls,
        *,
        cohort: float,
        rounds: int,
        sigma: float,
        clip: float = 1.0,
        delta: float = 1e-5,
        model: Any = None,
        every_step: int | None = None,
        **settings: Any,
    ) -> "Plan":
        """Return the plan that the paper prints: a reproduction, NOT A GUARANTEE.

        Every client adds normal noise of deviation sigma S, S = 2 C K / M, to what it sends, C the
        clip, K the expected cohort and M the clients. `plan.guarantee(M).statement()` sets the
        epsilon that the paper claims, sqrt(2 log(1.25/delta)) / sigma, beside the true ones by
        view; `coterie.privacy.published` has all columns of that comparison. In one thing the plan
        is better than the published form: a client's change of a whole round is clipped and noised,
        once. With `every_step`, the number M of clients, it is the published form: no clipping, and
        noise on each of the `sgd.steps` local gradients (default 1). No epsilon holds for that.
        The paper has K = 20 (CelebA) or 3 (FEMNIST), T = 400 or 1000 `rounds`, and sigma = .11,
        .65, 2.42 or 9.69; it does not state the clip.
        """
        # A plan stands above methods; only this recipe of a whole plan looks up to it.
        from coterie.planning.plan import Plan, Privacy
        from coterie.privacy.noise import PublishedLocal
        from coterie.privacy.sampling import Poisson

        usual: dict[str, Any] = {"last_solve": False, **settings}
        if model is not None:
            usual["model"] = model
        if every_step is not None:
            usual.setdefault("sgd", SGD(steps=1))
            noise = sigma * 2 * clip * cohort / every_step
            free = Privacy(epsilon=math.inf, relation="replace", delta=delta)
            method = cls(step_noise=noise, **usual)
            return Plan(method=method, privacy=free, sampler=Poisson(cohort), rounds=rounds)
        privacy = Privacy(
            noise_multiplier=sigma,
            noise=PublishedLocal(),
            relation="replace",
            delta=delta,
            clip=clip,
        )
        return Plan(method=cls(**usual), privacy=privacy, sampler=Poisson(cohort), rounds=rounds)

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models that do not fit, and splits that leave a side empty."""
        self.heads(spec)
        super().check(spec, **given)

    def heads(self, spec: Spec) -> tuple[str, ...]:
        """Return the names of the personal leaves; raise ValueError if a side is empty."""
        names = tuple(self.model.init(spec, Rng.seeded(0)))
        chosen = self._chosen(names, spec)
        if not chosen or len(chosen) == len(names):
            side, other = ("personal", "shared") if not chosen else ("shared", "personal")
            raise ValueError(
                f"{type(self.model).__name__}: the split leaves nothing {side}: all leaves "
                f"({', '.join(names)}) are {other}; use a model with several layers (mlp, cnn), or "
                "say what is personal by personal, head, encoder or split"
            )
        return chosen

    def _chosen(self, names: tuple[str, ...], spec: Spec) -> tuple[str, ...]:
        if self.split is not None:
            return tuple(name for name in names if self.split(name))
        paths = (self.head or self.encoder,) if self.head or self.encoder else self.personal
        if not paths:
            return self.model.head(spec)
        inside: set[str] = set()
        for path in paths:
            found = {name for name in names if _matches(name, path)}
            if not found:
                raise ValueError(self._unknown(path, names, spec))
            inside |= found
        return tuple(name for name in names if (name in inside) != bool(self.encoder))

    def _unknown(self, layer: str, names: tuple[str, ...], spec: Spec) -> str:
        tied = self.model.alias(spec, layer)
        if tied is not None:
            return (
                f"{layer!r} shares its parameters with {tied!r}: name that leaf, and the two are "
                "personal, or shared, together"
            )
        return (
            f"{layer!r} names no leaf or layer of {type(self.model).__name__}: its leaves are "
            f"{', '.join(names)}; use one of these, or a layer's path such as "
            f"{names[-1].rpartition('.')[0] or names[-1]!r}"
        )

    def contribution(self, spec: Spec) -> Tree:
        """Contribute the shared layers; the shared tree keeps the public start of the heads."""
        heads, params = self.heads(spec), self.model.init(spec, Rng.seeded(0))
        return {name: leaf for name, leaf in params.items() if name not in heads}

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Return the public start of the heads."""
        return stack({name: shared[name] for name in self.heads(spec)}, clients)

    def joined(self, shared: Tree, personal: Tree) -> Tree:
        """Return whole models, stacked: the shared layers with the clients' heads."""
        clients = len(next(iter(personal.values())))
        return {name: personal.get(name, leaf) for name, leaf in stack(shared, clients).items()}

    def _fit_heads(self, models: Tree, heads: Tree, clients: Clients, rng: Rng, round: int) -> Tree:
        longer = replace(self.sgd, epochs=self.head_epochs, steps=None)
        problem = replace(self.problem(), sgd=longer)
        return problem.solve(models, clients, rng, round=round, anchor=None, only=tuple(heads))

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Train shared layers and head; keep the head, contribute the change of the layers."""
        models = self.joined(shared, personal)
        layers = {name: leaf for name, leaf in shared.items() if name not in personal}
        only: tuple[str, ...] | None = None
        if self.alternate:
            models = self._fit_heads(models, personal, clients, rng.at("heads"), round)
            only = tuple(layers)
        after = (
            self.noisy_steps(models, tuple(layers), clients, rng, round)
            if self.step_noise
            else self.problem().solve(
                models, clients, rng, round=round, anchor=None, only=only, keep_failed=True
            )
        )
        change = {name: after[name] - leaf for name, leaf in layers.items()}
        kept = self.problem().settle(stack(shared, len(clients)), after, clients)
        return {name: kept[name] for name in personal}, change

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared layers by the released mean."""
        mean = post.mean
        moved = add({name: shared[name] for name in shared if name in mean}, mean)
        return {name: moved.get(name, leaf) for name, leaf in shared.items()}

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Put every head on the final shared layers, and fit it to them."""
        models = self.joined(shared, personal)
        if not self.last_solve:
            return models
        after = self._fit_heads(models, personal, clients, rng, 0)
        return self.problem().settle(stack(shared, len(clients)), after, clients)

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Put the heads as they are on the shared layers as they are."""
        return self.joined(shared, personal)


def _matches(name: str, layer: str) -> bool:
    inside = name == layer or name.startswith(f"{layer}.")
    return inside or fnmatch.fnmatchcase(name, layer)
