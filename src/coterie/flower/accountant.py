"""An accountant of privacy for Flower's own strategies: exact accounts, a durable ledger.

For people who keep their strategy of plain Flower (1.41 or later), whose differential privacy
wrappers take an accountant:

    accountant = CoterieAccountant(
        PrivacyConfig(
            target_delta=1e-5,
            population_size=205,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=4.0,
        ),
        folder="account",
    )
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=30.0, clipping_norm=1.0, num_sampled_clients=205,
        accountant=accountant,
    )

It has the methods of Flower's `PrivacyAccountant` protocol, and `certify`, which writes a
certificate that `coterie verify account` checks. Where everybody may take part (`no-amplification`)
the account is exact Gaussian DP; under Poisson sampling it composes privacy-loss distributions.

| Flower | here |
|---|---|
| add-or-remove-one, no-amplification | `zero_out`, a client may take part in every round |
| add-or-remove-one, poisson | `zero_out`, a hidden Poisson cohort, sample size / population |
| replace-one, without-replacement | `replace`, a fixed cohort that all others together know |

The last is larger than Flower's number: all other clients together know from their own invitations
who was drawn, so nothing is amplified against them.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.files import sync_folder, write_atomically
from coterie.privacy.accounting import profile
from coterie.privacy.events import Gaussian, Participation, Relation
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.ledger import locked
from coterie.runs.certificate import CERTIFICATE, describe_guarantee, seal
from coterie.runs.log import now, versions

if TYPE_CHECKING:
    from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent

FORMAT, FORMAT_VERSION = "coterie account", 1
LEDGER = "ledger.jsonl"
_BACKEND = "coterie"
_MODELS: Mapping[str, tuple[str, Relation]] = {
    "no-amplification": ("everyone", "zero_out"),
    "poisson": ("poisson", "zero_out"),
    "without-replacement": ("fixed", "replace"),
}
_CONFIG = ("target_delta", "population_size")
_FIELDS = ("noise_multiplier", "sample_size", "population_size")
_NEAR = 1e-9
Entry = dict[str, Any]


class CoterieAccountant:
    """Counts Gaussian releases of a Flower strategy; see the module docstring.

    **Guarantee:** `get_epsilon` is an upper bound for the releases that were composed, if every
    release is a sum of contributions clipped to the clipping norm, with a fixed denominator, plus
    Gaussian noise of `noise_multiplier` times that norm, and nothing else of the clients' data is
    released. That is what Flower's wrappers do in accounted mode; metrics are not counted, and
    Flower draws the noise in floating point. Tests: tests/test_flower_accountant.py.

    With a folder the account survives a crash. An event is on disk before `compose` returns. Flower
    asks `would_exceed` before a round, if there is a `max_epsilon`; the event that it permits is on
    disk too, and counts as spent if the process ends before `compose`: the release may be out.

    Args:
        config: Flower's `PrivacyConfig`.
        folder: Where the ledger and the certificate are; created if absent. None: in memory only.
    """

    def __init__(self, config: "PrivacyConfig", folder: Path | str | None = None) -> None:
        self._config = config
        self._kind, self._relation = _MODELS[_text(config.sampling_method)]
        self._counts: list[tuple[Gaussian, int]] = []
        self._sizes: set[int] = set()
        self._permitted: Entry | None = None
        self._folder = None if folder is None else Path(folder)
        self._open: Any = None
        if self._folder is not None:
            self._read(self._folder)

    @property
    def config(self) -> "PrivacyConfig":
        """The configuration that was given."""
        return self._config

    @property
    def num_releases(self) -> int:
        """How many releases were composed."""
        return sum(count for _, count in self._counts)

    @property
    def guarantee(self) -> Guarantee:
        """What the composed releases guarantee, at the target delta."""
        return self._guarantee(self._counts)

    def compose(self, event: "GaussianPrivacyEvent", count: int = 1) -> None:
        """Count releases; with a folder, they are on disk when this returns."""
        entry = self._entry(event, count)
        self._write({"charge": entry})
        self._permitted = None
        self._add(entry)

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound of epsilon of all releases at a delta."""
        _check(0 < delta < 1, f"delta = {delta}: expected a number between 0 and 1")
        return float(self._profile(self._counts).epsilon(delta)) if self._counts else 0.0

    def get_delta(self, epsilon: float) -> float:
        """Return an upper bound of delta of all releases at an epsilon."""
        _check(0 <= epsilon < math.inf, f"epsilon = {epsilon}: expected a number of at least 0")
        return float(self._profile(self._counts).delta(epsilon)) if self._counts else 0.0

    def get_privacy_spent(self, delta: float | None = None) -> "PrivacySpent":
        """Return what all releases spend, as Flower reports it."""
        from flwr.serverapp import PrivacySpent

        target = self._config.target_delta if delta is None else delta
        method = str(self._profile(self._counts).accountant) if self._counts else "none"
        return PrivacySpent(self.get_epsilon(target), target, self.num_releases, method)

    def would_exceed(
        self, event: "GaussianPrivacyEvent", max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Return whether more releases would exceed a limit of epsilon at the target delta.

        An event that it permits is noted in the ledger, where it counts after a crash only.
        """
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None or not 0 < limit < math.inf:
            raise ValueError(
                f"max_epsilon = {limit}: expected a number above 0, in PrivacyConfig or here"
            )
        entry = self._entry(event, count)
        more = [*self._counts, (Gaussian(entry["noise_multiplier"]), count)]
        if self._profile(more, entry["sample_size"]).epsilon(self._config.target_delta) > limit:
            return True
        if entry != self._permitted:
            self._write({"permit": entry})
            self._permitted = entry
        return False

    def state_dict(self) -> dict[str, object]:
        """Return the account as plain data."""
        sizes = sorted(self._sizes)
        return {
            "schema_version": 1,
            "backend": _BACKEND,
            "config": self._facts(),
            "compositions": [
                {"noise_multiplier": event.noise_multiplier, "count": count}
                for event, count in self._counts
            ],
            "sample_sizes": sizes,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what `state_dict` returned, into an account of the same configuration.

        An account that has counted releases is never replaced by a smaller one.
        """
        if state.get("schema_version") != 1 or state.get("backend") != _BACKEND:
            raise ValueError("state is not of a CoterieAccountant, or of another version")
        if state.get("config") != self._facts():
            raise ValueError("state has another configuration: make the accountant with the same")
        listed: Any = state["compositions"]
        found = [(Gaussian(float(one["noise_multiplier"])), int(one["count"])) for one in listed]
        if self._counts and self._counts != found[: len(self._counts)]:
            raise ValueError("state does not contain the releases that this account has counted")
        sizes: Any = state["sample_sizes"]
        for size in sizes:
            self._check_size(int(size))
        for event, count in found[len(self._counts) :]:
            entry = {"noise_multiplier": event.noise_multiplier, "count": count}
            entry |= {
                "sample_size": max(map(int, sizes)),
                "population_size": self._config.population_size,
            }
            self._write({"charge": entry})
            self._add(entry)

    def certify(self) -> Path:
        """Write the certificate of the account; return the folder, for `coterie verify`."""
        if self._folder is None or not self._counts:
            raise ValueError("a certificate needs a folder and a release: give folder=...")
        ledger = (self._folder / LEDGER).read_bytes()
        facts = describe_guarantee(self.guarantee)
        certificate = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **facts,
            "files": {LEDGER: hashlib.sha256(ledger).hexdigest()},
            "versions": versions(),
            "finished": now()[:16],
        }
        certificate["sha256"] = seal(certificate)
        text = json.dumps(certificate, indent=2, allow_nan=False)
        write_atomically(self._folder / CERTIFICATE, text.encode())
        return self._folder

    def _guarantee(self, counted: list[tuple[Gaussian, int]]) -> Guarantee:
        events = tuple(event for event, count in counted for _ in range(count))
        return Guarantee(
            events=events,
            participation=self._participation(max(self._sizes, default=1)),
            relation=self._relation,
            delta=self._config.target_delta,
            clients=self._config.population_size,
            assumed=("which clients answer a round", "that metrics reveal nothing"),
        )

    def _profile(self, counted: list[tuple[Gaussian, int]], size: int | None = None) -> Any:
        events = [event for event, count in counted for _ in range(count)]
        known = self._participation(max(self._sizes, default=1) if size is None else size)
        return profile(events, known.to_others, self._relation)

    def _participation(self, size: int) -> Participation:
        rate = 1.0 if self._kind == "everyone" else size / self._config.population_size
        return Participation(self._kind if rate < 1 else "everyone", rate)  # type: ignore[arg-type]

    def _entry(self, event: "GaussianPrivacyEvent", count: int) -> Entry:
        _check(type(count) is int and count > 0, f"count = {count}: expected a whole number >= 1")
        population = self._config.population_size
        if event.population_size != population:
            raise ValueError(
                f"population_size = {event.population_size}: expected {population}, as configured"
            )
        self._check_size(event.sample_size)
        return {**{name: getattr(event, name) for name in _FIELDS}, "count": count}

    def _check_size(self, size: int) -> None:
        if self._kind != "everyone" and self._sizes and size not in self._sizes:
            raise ValueError(
                f"sample_size = {size} after {max(self._sizes)}: sampled releases of different "
                "sizes have no common account here; keep one size"
            )

    def _add(self, entry: Entry) -> None:
        self._sizes.add(int(entry["sample_size"]))
        self._counts.append((Gaussian(float(entry["noise_multiplier"])), int(entry["count"])))

    def _facts(self) -> dict[str, Any]:
        """Return the configuration as plain data; a limit may change, and is not part of it."""
        config = self._config
        kinds = (config.neighboring_relation, config.sampling_method)
        names = ("neighboring_relation", "sampling_method")
        plain = {name: getattr(config, name) for name in _CONFIG}
        return plain | {name: _text(kind) for name, kind in zip(names, kinds, strict=True)}

    def _read(self, folder: Path) -> None:
        """Read the ledger of a folder, or begin one; an event that was permitted last counts."""
        folder.mkdir(parents=True, exist_ok=True)
        self._open = locked(folder)
        self._open.__enter__()
        path = folder / LEDGER
        if not path.exists():
            self._write({"format": FORMAT, "config": self._facts()})
            sync_folder(folder)
            return
        lines = path.read_bytes().split(b"\n")
        try:
            first, *entries = [json.loads(line) for line in lines[:-1]]
            if first != {"format": FORMAT, "config": self._facts()}:
                raise ValueError("it has another configuration")
            for one in entries:
                if "charge" in one:
                    self._add(one["charge"])
            if lines[-1]:  # cut off by a crash: in doubt the release was out
                os.truncate(path, sum(len(line) + 1 for line in lines[:-1]))
                entries.append({"permit": self._of_torn(lines[-1], entries)})
            if entries and "permit" in entries[-1]:
                self._write({"charge": entries[-1]["permit"]})
                self._add(entries[-1]["permit"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} cannot be read ({error}); restore it") from error

    def _of_torn(self, line: bytes, entries: list[Entry]) -> Entry:
        """Return the event of a line that was cut off: its own, or the one before it."""
        with suppress(ValueError):
            entries = [*entries, json.loads(line)]
        last: Entry = next(iter(entries[-1].values()))
        return last

    def _write(self, line: Entry) -> None:
        if self._folder is None:
            return
        with (self._folder / LEDGER).open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _text(kind: Any) -> str:
    return str(getattr(kind, "value", kind))


def _check(good: bool, problem: str) -> None:
    if not good:
        raise ValueError(problem)
