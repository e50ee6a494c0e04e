"""The plan: one frozen value from TOML or flags to the guarantee.

A plan states what is computed, the budget, and how a run is carried out. `coterie.planning.rules`
fills in open values from public facts, before any data is used. Method, privacy, sampling and
rounds determine the events of every round, and the events determine epsilon. So a plan exists only
if its privacy can be accounted. Only `Plan.open` makes a billboard.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.core.config import (
    ConfigError,
    from_table,
    naming,
    read_toml,
    refuse_code,
    to_table,
    to_toml,
)
from coterie.core.tree import Tree, size
from coterie.data.config import DataConfig
from coterie.data.federated import Spec
from coterie.methods.base import Method, Shape, choices, keeps_state
from coterie.planning.about import About
from coterie.planning.advice import MOST_ROUNDS
from coterie.planning.stragglers import Stragglers
from coterie.privacy.billboard import Billboard
from coterie.privacy.calibrate import Even, Spending
from coterie.privacy.entropy import open_entropy
from coterie.privacy.events import Relation
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.ledger import Ledger
from coterie.privacy.mechanisms import MOST_CLIENTS, Exact, Mechanism
from coterie.privacy.noise import GaussianNoise, Noise, Request
from coterie.privacy.sampling import Poisson, Sampler
from coterie.privacy.selection import Charged
from coterie.privacy.transcript import FolderTranscript, MemoryTranscript, Transcript

TunedOn = Literal["no", "public", "charged", "not covered"]
_GUARANTEED = ("method", "privacy", "sampler", "rounds", "simulation_seed", "tuned")
"""Fields that decide on the releases and their guarantee; the ledger is bound to them."""
NO_DATA = DataConfig(name="")
"""The data of a plan whose caller brings a dataset."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Settings that change how fast a run is, and nothing else.

    Attributes:
        block: Clients computed side by side; 0 chooses by the model's size.
        device: "cpu" or "cuda".
        store: "memory", or "disk" to keep personal models memory-mapped, so that clients times
            parameters may exceed memory.
        precision: Of the products in local steps of networks: "float32", "bfloat16" (mixed), or
            "tf32", which rounds their factors to 10 bits on GPUs that can and is float32 elsewhere.
        keep_posts: Whether a run without a folder keeps its releases in memory. False for long runs
            of large networks: a release has 8 bytes per shared parameter. `outcome.posts` then
            raises KeyError; ledger and guarantee are the same.
    """

    block: int = 0
    device: str = "cpu"
    store: Literal["memory", "disk"] = "memory"
    precision: Literal["float32", "bfloat16", "tf32"] = "float32"
    keep_posts: bool = True

    def __post_init__(self) -> None:
        if self.block < 0:
            raise ValueError(f"block = {self.block}: expected a number of clients, or 0 to choose")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device = {self.device!r}: expected 'cpu' or 'cuda'")
        if self.device.startswith("cuda"):
            import torch

            if not torch.cuda.is_available():
                raise ValueError(
                    f"device = {self.device!r}: no CUDA device is available; use 'cpu'"
                )

    def clients(self, tree: Tree) -> int:
        """Return the block size for clients with this tree."""
        row = 32.0 * max(size(tree), 1)  # bytes: float64 copies of a contribution
        if self.device != "cpu":
            return self.block or int(np.clip(8e9 / row, 1, 16384))
        # Blocks that stay in a core's cache, but with enough clients for all threads, unless
        # memory asks for fewer.
        return self.block or int(np.clip(16e6 / row, max(1.0, min(64.0, 1e9 / row)), 4096))


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The privacy budget, and how it is measured.

    Attributes:
        epsilon: The budget of the whole run, against the other clients; `inf` for a run without
            privacy. Give either this or `noise_multiplier`.
        noise_multiplier: The noise of every round's sum, in units of the clip.
        delta: Default min(1e-5, 1 / (10 clients)); 0 for pure epsilon (Laplace noise).
        relation: "zero_out" (a client's contributions replaced by zeros) or "replace" (by another
            client's).
        clip: The bound on a client's contribution in one round: on its l2 norm; on its l1 norm
            under Laplace noise; for second moments, on the norm of the vector whose moment is
            released (MP-MTL's K; for their diagonals under Gaussian noise, on its l4 norm). None
            for the method's default.
        spend: How the budget is spread over rounds: even, power, geometric, or theorem (the
            shape that the method's theory recommends).
        budget: Instead of `spend`, weights of the rounds (a weight multiplies the round's share of
            mu); empty for none.
        noise: The kind of noise, or its name; see `coterie.privacy.mechanisms`. Under "local",
            clients add it themselves: epsilon then also holds against the server, and
            `noise_multiplier` is that of each client's message.
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
                f"delta = {self.delta}: expected a number from 1e-30 to below 1, or 0 for pure "
                "epsilon (Laplace noise)"
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
        """Return the weights of the rounds."""
        return self.budget or self.spend.weights(rounds)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Method, privacy, sampling and rounds, which own the guarantee; and how a run is made.

    Attributes:
        method: What is computed; `Auto()` to have it chosen by rule.
        sampler: Who takes part. Default: everyone; `Poisson(cohort)` samples each client
            independently, with a hidden cohort.
        rounds: Number of releases; None to have it chosen by rule
            (`coterie.planning.rules.resolve`).
        simulation_seed: Makes noise and cohorts reproducible, and the run a simulation: its
            outputs say so, and it protects nobody.
        tuned: On which rows settings were chosen: "public" costs nothing, "charged" was paid for
            (`coterie.tune`), "not covered" is private rows, and is shown wherever epsilon is.
        data: What is read and how it is split; `NO_DATA` where the caller brings the data.
        compare_with_local: Whether the local baseline is trained and scored beside the run.
        baselines: Names of the baselines to score, see `coterie.evaluation.baselines`.
        charged: The charged selection that this run belongs to, if any.
        stragglers: Puts clients on a virtual clock.
        history: Whether every round is scored on test rows; None: where that is cheap.
        newcomers: Clients held out of training and onboarded afterwards: a share, or a number.
        chosen: Why the method was chosen, where that was left to rules.
        heeded: Whether that is local training because of the verdict on joining.
        about: What the owner declares: the unit, the operator, public inputs. It changes nothing.
    """

    method: Method
    privacy: Privacy
    sampler: Sampler = field(default_factory=Poisson)
    rounds: int | None = None
    simulation_seed: int | None = None
    tuned: TunedOn = "no"
    data: DataConfig = NO_DATA
    speed: Speed = field(default_factory=Speed)
    compare_with_local: bool = True
    baselines: tuple[str, ...] = ("local",)
    charged: Charged | None = None
    stragglers: Stragglers | None = None
    history: bool | None = None
    newcomers: int | float | None = None
    chosen: str = ""
    heeded: bool = False
    about: About | None = None
    _mechanisms: dict[int, tuple[Mechanism, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        seed, rounds = self.simulation_seed, self.rounds
        if seed is not None and seed < 0:
            raise ValueError(f"simulation_seed = {seed}: expected a whole number >= 0")
        if self.about is not None and self.about.inputs:
            self.about.check(self.to_table())
        if rounds is None:
            return
        if not isinstance(rounds, int) or not 1 <= rounds <= MOST_ROUNDS:
            raise ValueError(
                f"rounds = {rounds}: expected a whole number of at least 1 and at most "
                f"{MOST_ROUNDS:,}"
            )
        if self.privacy.budget and len(self.privacy.budget) != rounds:
            raise ValueError(
                f"budget has {len(self.privacy.budget)} weights for {rounds} rounds: "
                "give one weight per round"
            )
        self.privacy.weights(rounds)  # refuses a shape that leaves a round without budget

    def __repr__(self) -> str:
        privacy, data = self.privacy, self.data.name
        noise = f"noise multiplier {privacy.noise_multiplier}"
        budget = noise if privacy.epsilon is None else f"epsilon {privacy.epsilon:g}"
        seed = "" if self.simulation_seed is None else f", SIMULATION seed {self.simulation_seed}"
        rounds = "rounds by rule" if self.rounds is None else f"{self.rounds} rounds"
        on = f" on {data}" if data else ""
        return f"<Plan: {self.method.kind}{on}, {budget}, {rounds}{seed}; to_table() has all>"

    @property
    def posts(self) -> int:
        """Number of releases that the plan pays for."""
        once = {Shape.NONE: 0, Shape.POOLED: 1}
        if self.method.shape in once:
            return once[self.method.shape]
        if self.rounds is None:
            raise ValueError("rounds = None: call coterie.planning.rules.resolve(plan, spec) first")
        return self.rounds

    @property
    def private(self) -> bool:
        """Whether the plan has a budget."""
        return self.privacy.epsilon != math.inf

    def delta(self, clients: int) -> float:
        """Return the delta at which epsilon is stated."""
        given = self.privacy.delta
        return self.privacy.noise.usual_delta(clients) if given is None else given

    def clip(self, clients: int) -> float:
        """Return the bound on a client's contribution in one round."""
        given = self.privacy.clip
        return self.method.clipping(clients, self.posts).clip if given is None else given

    def noise_multipliers(self, clients: int) -> tuple[float, ...]:
        """Return the noise multiplier of each round; empty without Gaussian noise or releases."""
        events = [mechanism.event() for mechanism in self.mechanisms(clients)]
        noise = (getattr(event, "noise_multiplier", None) for event in events)
        return tuple(one for one in noise if one is not None)

    def shows_cohort(self, clients: int) -> bool:
        """Return whether the adversary observes the sampled cohort."""
        return self.sampler.participation(clients).visible or self.privacy.noise.local

    def hides_cohort(self, clients: int) -> bool:
        """Return whether cohorts are sampled and the adversary sees neither members nor size."""
        rate = self.sampler.participation(clients).rate
        return rate < 1 and not self.shows_cohort(clients)

    def relative_error(self, spec: Spec) -> float | None:
        """Return the noise of a released mean over the clip, in the noisiest round.

        sqrt(parameters) z / (expected cohort) for sums with Gaussian noise; at full participation
        sqrt(parameters rounds) / (clients mu). Below 0.3 the noise is negligible; above 1 a
        released mean is mostly noise. Where blocks of a contribution have bounds of their own, the
        first block counts; for noise that is correlated over rounds, independent noise that leaves
        as much in sums of releases. A function of public facts; None without noise.
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
        """Return the mechanism of each round, calibrated once."""
        if clients not in self._mechanisms:
            self._mechanisms[clients] = self._calibrate(clients)
        return self._mechanisms[clients]

    def _calibrate(self, clients: int) -> tuple[Mechanism, ...]:
        privacy, shape = self.privacy, self.method.shape
        if privacy.spend.by_method:
            raise ValueError(
                'spend = "theorem": call coterie.planning.rules.resolve(plan, spec) first'
            )
        if self.posts == 0 or not self.private:
            return (Exact(shape, clients if shape is Shape.ROWS else 0),) * self.posts
        if shape is Shape.POOLED:
            raise ValueError(
                f"{self.method.kind} brings all rows together and is not private: run it with "
                "epsilon = inf"
            )
        bounds = self.method.clipping(clients, self.posts, self.clip(clients))
        request = Request(
            shape=shape,
            clip=self.clip(clients),
            epsilon=privacy.epsilon,
            noise_multiplier=privacy.noise_multiplier,
            delta=self.delta(clients),
            weights=privacy.weights(self.posts),
            clients=clients,
            participation=self.sampler.participation(clients),
            relation=privacy.relation,
            rows=bounds.rows,
            blocks=bounds.blocks,
        )
        return privacy.noise.mechanisms(request)

    def guarantee(self, clients: int, posts: int | None = None) -> Guarantee:
        """Return what the plan, or its first `posts` releases, guarantees.

        In a cohort of fixed size the participation of one client changes that of others. If clients
        keep state between rounds, later contributions of others then depend on who took part
        before, and amplification by sampling is not proved, not even for an outsider. The cohort
        counts as visible there.
        """
        participation = self.sampler.participation(clients)
        replaced = self.privacy.relation == "replace"  # under zero_out such a cohort is refused
        if participation.kind == "fixed" and replaced and keeps_state(self.method):
            participation = replace(participation, visible=True)
        return Guarantee(
            events=tuple(mechanism.event() for mechanism in self.mechanisms(clients)[:posts]),
            participation=participation,
            relation=self.privacy.relation,
            delta=self.delta(clients),
            clients=clients,
            simulation=self.simulation_seed is not None,
            unit=(self.about and self.about.unit) or "",
        )

    def open(self, spec: Spec, folder: Path | None = None, *, keep_posts: bool = True) -> Billboard:
        """Open the billboard: open ledger and transcript, continue where they stand.

        Without a folder, `keep_posts` says whether releases can be read after they are made.
        """
        self._check_exact(spec.clients)
        # Raises here, before anything is spent, if sampling and relation cannot be accounted for.
        events = self.guarantee(spec.clients).events
        path = None if folder is None else folder / "ledger.jsonl"
        transcript: Transcript = (
            MemoryTranscript(keep_posts) if folder is None else FolderTranscript(folder / "posts")
        )
        return Billboard(
            mechanisms=self.mechanisms(spec.clients),
            template=self.method.contribution(spec),
            cohort=self.sampler.expected(spec.clients),
            ledger=Ledger(list(events), path, self.digest(spec)),
            transcript=transcript,
            entropy=lambda index: open_entropy(self.simulation_seed, "noise", index),
            repeats=self.simulation_seed is not None,
        )

    def _check_exact(self, clients: int) -> None:
        """Raise ValueError if a sum could have more parts than float64 adds exactly.

        **Guarantee:** a release is a function of an exact sum. Its parts are the contributions of
        the cohort, at most `sampler.largest`, and, where noise is added in shares, a share of every
        client. A cohort of fixed size is never larger; a Poisson cohort may be everybody. Test:
        tests/planning/test_plan.py.
        """
        in_shares = any(mechanism.in_shares for mechanism in self.mechanisms(clients))
        parts = clients if in_shares else self.sampler.largest(clients)
        if parts > MOST_CLIENTS:
            raise ValueError(
                f"{clients} clients: sums are exact for at most {MOST_CLIENTS} in a round; draw "
                "cohorts of fixed size (--sampling fixed), or split the federation"
            )

    def digest(self, spec: Spec) -> str:
        """Return the hash of what decides on the releases, on data of this spec."""
        table = self.to_table()
        decided = {key: table[key] for key in _GUARANTEED if key in table}
        return hashlib.sha256((to_toml(decided) + repr(spec)).encode()).hexdigest()

    def to_table(self) -> dict[str, Any]:
        """Return the plan as plain tables."""
        table = to_table(self)
        assert isinstance(table, dict)
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Plan":
        """Return the plan of plain tables; unknown keys raise ConfigError.

        A table `effects` of its own is that of `data`.
        """
        if isinstance(effects := table.get("effects"), Mapping):
            data = {"name": "", "effects": effects} | dict(table.get("data") or {})
            table = {key: one for key, one in table.items() if key != "effects"} | {"data": data}
        _check_settings(table.get("method"))
        return from_table(cls, table, "plan")

    @classmethod
    def load(cls, path: Path, *, trust: bool = True) -> "Plan":
        """Return the plan of a TOML file.

        Without `trust`, as for the run folders of others, it may name no code.

        Raises:
            ConfigError: If it cannot be read, is wrong, or names code without `trust`.
        """
        table = read_toml(path)
        with naming(path):
            if not trust:
                refuse_code(table, path)
            return cls.from_table(table)


def fill_kinds(table: Mapping[str, Any]) -> None:
    """Fill in the kinds of model and sampler where a plan's table has only settings of them."""
    method = table.get("method")
    model = method.get("model") if isinstance(method, dict) else None
    usual = choices().get(method.get("kind", "auto")) if isinstance(method, dict) else None
    named = "linear" if usual is None else usual().model.kind
    for place, kind in ((model, named), (table.get("sampler"), "poisson")):
        if isinstance(place, dict):
            place.setdefault("kind", kind)


def _check_settings(method: Any) -> None:
    """Raise ConfigError for settings of a method that is still to be chosen."""
    if not isinstance(method, dict):
        return
    _check_settings(method.get("base"))
    given = sorted(set(method) - {"kind", "model"})
    if method.get("kind") == "auto" and given:
        raise ConfigError(
            f"method.{given[0]} was set, but no method is named: auto chooses one by rule and has "
            "no settings but the model; name a method, such as --method pmtl"
        )
