"""A method and a mechanism for coterie, in a package of their own.

FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021, Algorithm 1. In a round a client fits its head against the shared
representation, then takes steps on the representation with the head fixed, and contributes the
change of the representation. Coterie clips and sums the contributions and adds noise; heads stay
with the clients, so the billboard lemma covers them.

TwoServers: Gaussian noise from two servers, so that one honest server is enough.
"""

import math
from dataclasses import dataclass, field

import coterie as ct
from coterie.models import Model
from coterie.privacy.mechanisms import GaussianSum
from coterie.rng import Rng
from coterie.solvers.local import LocalProblem
from coterie.tree import add, stack


@ct.register("fedrep", releases="a clipped, noised mean change of the representation")
@dataclass(frozen=True, kw_only=True)
class FedRep(ct.Method):
    """A shared representation, with a personal head that is fitted first in every round.

    Attributes:
        model: A network; its last linear layer is the head.
        head_sgd: Steps on the head, in every round and after the last one.
        sgd: Steps on the representation, in every round.
    """

    model: Model = field(default_factory=lambda: ct.MLP(hidden=(8,)))
    head_sgd: ct.SGD = field(default_factory=lambda: ct.SGD(epochs=5))
    sgd: ct.SGD = field(default_factory=ct.SGD)

    def check(self, spec, *, cohort=None, data=None):
        """Raise ValueError for models that are a head only."""
        super().check(spec, cohort=cohort, data=data)
        if not self.contribution(spec):
            raise ValueError(
                f"fedrep shares all layers but the last, and {type(self.model).__name__} has one "
                "layer: use a network such as mlp"
            )

    def contribution(self, spec):
        """Contribute the representation."""
        head = self.model.head(spec)
        leaves = self.model.init(spec, Rng.seeded(0))
        return {name: leaf for name, leaf in leaves.items() if name not in head}

    def init_client_state(self, shared, spec, clients):
        """Return the heads, all at their public start."""
        return stack({name: shared[name] for name in self.model.head(spec)}, clients)

    def local_update(self, shared, personal, clients, rng, round):
        """Fit the head, then the representation; contribute the change of the latter."""
        start = self.current_models(shared, personal, clients)
        fitted = self._fit(start, tuple(personal), self.head_sgd, clients, rng.at("head"), round)
        layers = tuple(name for name in shared if name not in personal)
        after = self._fit(fitted, layers, self.sgd, clients, rng.at("layers"), round)
        head = {name: fitted[name] for name in personal}
        return head, {name: after[name] - shared[name] for name in layers}

    def server_update(self, shared, post):
        """Add the released mean change to the representation."""
        moved = add({name: shared[name] for name in post.mean}, post.mean)
        return {**shared, **moved}

    def personalise(self, shared, personal, clients, rng):
        """Fit every head to the final representation."""
        start = self.current_models(shared, personal, clients)
        return self._fit(start, tuple(personal), self.head_sgd, clients, rng, 0)

    def current_models(self, shared, personal, clients):
        """Return the shared representation with each client's head."""
        return {**stack(shared, len(clients)), **personal}

    def _fit(self, models, leaves, sgd, clients, rng, round):
        problem = LocalProblem(model=self.model, how="sgd", sgd=sgd, lam=0.0)
        return problem.solve(models, clients, rng, round=round, anchor=None, only=leaves)


@dataclass(frozen=True)
class TwoServers(GaussianSum):
    """A clipped sum to which two servers each add Gaussian noise of the full size.

    **Guarantee:** the release is that of `GaussianSum(bound, noise_multiplier)`, with the same
    event, also against an adversary who knows the noise of one of the two servers: given that
    noise, the release is the other server's Gaussian release, shifted by a known value.
    """

    def draws(self, totals):
        """Return the number of normals of both servers."""
        return 2 * super().draws(totals)

    def perturb(self, total, entropy):
        """Return the sum plus the noise of both servers."""
        return super().perturb(super().perturb(total, entropy), entropy)

    def standard_deviations(self, totals):
        """Return the standard deviation of both noises together."""
        return {
            name: math.sqrt(2) * one for name, one in super().standard_deviations(totals).items()
        }

    @property
    def noise_over_bound(self):
        """Standard deviation of the noise over the bound."""
        return math.sqrt(2) * super().noise_over_bound
