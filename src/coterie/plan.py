"""The plan: one frozen value that owns the guarantee, made before any data is touched.

A plan exists only if it can be accounted for: method, privacy, sampling and rounds fix the events
by round, the events fix epsilon. `Plan.open` is the only maker of a billboard.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.config import from_table, to_table, to_toml
from coterie.data.federated import Spec
from coterie.methods.base import Method, Shape
from coterie.privacy.billboard import Billboard
from coterie.privacy.calibrate import Even, Spending
from coterie.privacy.entropy import open_entropy
from coterie.privacy.events import Relation
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.ledger import Ledger
from coterie.privacy.mechanisms import (
    MOST_CLIENTS,
    Exact,
    Mechanism,
)
from coterie.privacy.noise import GaussianNoise, Noise, Request
from coterie.privacy.sampling import Poisson, Sampler
from coterie.privacy.transcript import FolderTranscript, MemoryTranscript, Transcript
from coterie.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What may be spent, and how it is measured.

    Attributes:
        epsilon: The budget of the whole run, for the view of the other clients (under a hidden
            cohort of fixed size: of an outsider; see the guarantee's `views`); `inf` for a run
            without privacy. Give either this or `noise_multiplier`.
        noise_multiplier: The noise of every round's sum, in units of the clip.
        delta: Default min(1e-5, 1 / (10 clients)); 0 for noise that is pure.
        relation: "zero_out" (a client's contributions replaced by zeros) or "replace" (by another
            client's).
        clip: The bound on a client's contribution of one round: on its l2 norm; its l1 norm under
            Laplace noise; of second moments, on the norm of the vector whose moment is posted
            (MP-MTL's K; of their diagonals under Gaussian noise, on its l4 norm). None for the
            method's usual one: 0.5, or by a rule of public facts.
        spend: How the budget is spread over rounds: even, power or geometric.
        budget: Instead of `spend`, weights of the rounds (a weight multiplies the round's share of
            mu); empty for none.
        noise: The kind of noise, or its name: gaussian, laplace, wishart, wishart_paper; local
            (clients add it themselves; epsilon then is for the server and the other clients, and
            `noise_multiplier` is that of each client's message), local_paper.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    relation: Relation = "zero_out"
    clip: float | None = None
    spend: Spending = field(default_factory=Even)
    budget: tuple[float, ...] = ()
    noise: Noise = field(default_factory=GaussianNoise)

    def __post_init__(self) -> None:
        if isinstance(self.noise, str):
            object.__setattr__(self, "noise", Noise.named(self.noise))
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"epsilon = {self.epsilon}, noise_multiplier = {self.noise_multiplier}: "
                "give exactly one of them"
            )
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon = {self.epsilon}: expected a positive number, or inf")
        if self.noise_multiplier is not None and not 1e-5 <= self.noise_multiplier <= 1e9:
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier}: expected a number from 1e-5 to 1e9"
            )
        if self.delta is not None and not (self.delta == 0 or 1e-30 <= self.delta < 1):
            raise ValueError(
                f"delta = {self.delta}: expected a number from 1e-30 to below 1, or 0 for noise "
                "that is pure"
            )
        if self.relation not in ("zero_out", "replace"):
            raise ValueError(f"relation = {self.relation!r}: expected 'zero_out' or 'replace'")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip = {self.clip}: expected a positive number")
        self._check_budget()

    def _check_budget(self) -> None:
        if any(not 0 < weight < math.inf for weight in self.budget):
            raise ValueError(f"budget = {self.budget}: expected positive weights, one per round")
        if self.budget and self.spend != Even():
            raise ValueError(
                f"budget = {self.budget} and spend = {self.spend}: give weights or a shape"
            )

    def weights(self, rounds: int) -> tuple[float, ...]:
        """Return the weights of so many rounds."""
        return self.budget or self.spend.weights(rounds)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Method, privacy, sampling and rounds; owns the guarantee.

    Attributes:
        method: What is computed.
        privacy: What may be spent.
        sampler: Who takes part; by default everyone, by independent coins with a hidden cohort
            when `Poisson(cohort)` names an expected cohort.
        rounds: How many posts; ignored by methods that post nothing.
        simulation_seed: Makes noise and cohorts reproducible, and the run a simulation: its
            outputs say so, and it protects nobody.
        tuned: How the settings were chosen, as far as privacy cares; the ledger is bound to it.
    """

    method: Method
    privacy: Privacy
    sampler: Sampler = field(default_factory=Poisson)
    rounds: int = 25
    simulation_seed: int | None = None
    tuned: str = "no"

    def __post_init__(self) -> None:
        if not isinstance(self.rounds, int) or self.rounds < 1:
            raise ValueError(f"rounds = {self.rounds}: expected a whole number of at least 1")
        if self.privacy.budget and len(self.privacy.budget) != self.rounds:
            raise ValueError(
                f"budget has {len(self.privacy.budget)} weights for {self.rounds} rounds: "
                "give one weight per round"
            )
        self.privacy.weights(self.rounds)  # refuses a shape that leaves a round without budget

    @property
    def posts(self) -> int:
        """How many posts the plan pays for."""
        once = {Shape.NONE: 0, Shape.POOLED: 1}
        return once.get(self.method.shape, self.rounds)

    def delta(self, clients: int) -> float:
        """Return the delta at which epsilon is stated."""
        given = self.privacy.delta
        return self.privacy.noise.usual_delta(clients) if given is None else given

    def clip(self, clients: int) -> float:
        """Return the bound on a client's contribution of one round."""
        given = self.privacy.clip
        return self.method.clipping(clients, self.rounds).clip if given is None else given

    def noise_multipliers(self, clients: int) -> tuple[float, ...]:
        """Return the noise multiplier of each round; empty without Gaussian noise or posts."""
        events = [mechanism.event() for mechanism in self.mechanisms(clients)]
        noise = (getattr(event, "noise_multiplier", None) for event in events)
        return tuple(one for one in noise if one is not None)

    def shows_cohort(self, clients: int) -> bool:
        """Return whether somebody from whom data is kept sees who takes part in a round."""
        return self.sampler.participation(clients).visible or self.privacy.noise.local

    def hides_cohort(self, clients: int) -> bool:
        """Return whether some are drawn for a round, and nobody else may know who, or how many."""
        rate = self.sampler.participation(clients).rate
        return rate < 1 and not self.shows_cohort(clients)

    def relative_error(self, spec: Spec) -> float | None:
        """Return whether the plan can learn at all: the noise of a posted mean over the clip.

        sqrt(numbers) z / (expected cohort) of the noisiest round, for sums with Gaussian noise; at
        full participation sqrt(numbers rounds) / (clients mu). Below 0.3 the noise is hardly felt;
        above 1 a posted mean is mostly noise. Where blocks of a contribution are bounded each on
        its own, that of the first: z / sqrt(its share) for z. A function of public facts; None for
        other noise.
        """
        clients = spec.clients
        mechanisms = [one for one in self.mechanisms(clients) if one.event().noisy]
        if not mechanisms:
            return None
        noise = max(mechanism.noise_over_bound for mechanism in mechanisms)
        rule = self.method.rounds(spec)
        mean = rule.share * self.sampler.expected(clients)
        return math.sqrt(rule.dimension) * noise / mean

    def mechanisms(self, clients: int) -> tuple[Mechanism, ...]:
        """Return the mechanism of each round, calibrated."""
        privacy, shape = self.privacy, self.method.shape
        if self.posts == 0 or privacy.epsilon == math.inf:
            return (Exact(shape, clients if shape is Shape.ROWS else 0),) * self.posts
        if shape is Shape.POOLED:
            raise ValueError(
                f"{self.method.kind} brings all rows together and is not private: run it with "
                "epsilon = inf"
            )
        bounds = self.method.clipping(clients, self.rounds, self.clip(clients))
        ask = Request(
            shape=shape,
            clip=self.clip(clients),
            epsilon=privacy.epsilon,
            noise_multiplier=privacy.noise_multiplier,
            delta=self.delta(clients),
            weights=privacy.weights(self.rounds),
            clients=clients,
            participation=self.sampler.participation(clients),
            relation=privacy.relation,
            rows=bounds.rows,
            blocks=bounds.blocks,
        )
        return privacy.noise.mechanisms(ask)

    def guarantee(self, clients: int, posts: int | None = None) -> Guarantee:
        """State what the plan (or its first so many posts) guarantees."""
        return self._guarantee(self.mechanisms(clients)[:posts], clients)

    def open(self, spec: Spec, shared: Tree, folder: Path | None = None) -> Billboard:
        """Open the billboard: calibrate, open ledger and transcript, go on where they stand."""
        if spec.clients > MOST_CLIENTS:
            raise ValueError(
                f"{spec.clients} clients: sums are exact for at most {MOST_CLIENTS}; "
                "split the federation"
            )
        mechanisms = self.mechanisms(spec.clients)
        # Fails here, before anything is spent, if sampling and relation cannot be accounted for.
        self._guarantee(mechanisms, spec.clients)
        events = [mechanism.event() for mechanism in mechanisms]
        path = None if folder is None else folder / "ledger.jsonl"
        transcript: Transcript = (
            MemoryTranscript() if folder is None else FolderTranscript(folder / "posts")
        )
        return Billboard(
            mechanisms=mechanisms,
            template=self.method.contribution(spec),
            cohort=self.sampler.expected(spec.clients),
            ledger=Ledger(events, path, self.digest(spec)),
            transcript=transcript,
            entropy=lambda index: open_entropy(self.simulation_seed, "noise", index),
        )

    def digest(self, spec: Spec) -> str:
        """Name this plan on data of this spec, for the ledger."""
        return hashlib.sha256((to_toml(self.to_table()) + repr(spec)).encode()).hexdigest()

    def to_table(self) -> dict[str, Any]:
        """Return the plan as plain tables."""
        table = to_table(self)
        assert isinstance(table, dict)
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Plan":
        """Read a plan from plain tables; unknown keys are refused."""
        return from_table(cls, table, "plan")

    def _guarantee(self, mechanisms: tuple[Mechanism, ...], clients: int) -> Guarantee:
        return Guarantee(
            events=tuple(mechanism.event() for mechanism in mechanisms),
            participation=self.sampler.participation(clients),
            relation=self.privacy.relation,
            delta=self.delta(clients),
            clients=clients,
            simulation=self.simulation_seed is not None,
        )
