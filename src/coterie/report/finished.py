"""Reading what finished runs have left in their folders; see `coterie.run` for the files."""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from coterie.full_disks import how_to_finish
from coterie.privacy.guarantee import OTHERS, OUTSIDER, Guarantee, round_up, view_of
from coterie.privacy.selection import CHOSEN_ONLY, chosen_alone

Array = NDArray[np.float64]

_RESULT = {"method", "data", "clients", "rounds", "metric", "value", "simulation"}
_COLUMNS = {"client", "train_rows", "test_rows", "error"}
_DIRECTIONS = {"nmse": "smaller is better", "accuracy": "larger is better"}
_UNSCORED = "test metric (stayed at the sites)"
_HISTORY = {"round", "seconds", "answered", "value"}


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run folder holds.

    Attributes:
        folder: Where it is.
        label: Its name beside other runs.
        result: The summary.
        guarantee: Rebuilt, so that epsilon is computed anew.
        plan: The plan's text.
        versions: Of the software that stated the guarantee.
        metrics: Columns by name, a row a client; `error_alone` and those of references
            (`error_local_star`, ...) may be missing. None at all of a deployment whose scores
            stayed at its sites.
        history: Columns by name, a row a round; none where the run kept no history.
        newcomers: As metrics, of clients who joined after training; none where nobody did.
        entry: Its name in a comparison, if it is of one.
        selection: What its certificate says of the private choice that it came of, if it did.
    """

    folder: Path
    label: str
    result: dict[str, Any]
    guarantee: Guarantee
    plan: str
    versions: dict[str, str]
    metrics: dict[str, Any]
    history: dict[str, Array]
    newcomers: dict[str, Any] = field(default_factory=dict)
    entry: str = ""
    selection: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """What runs that belong together are called: a comparison's own name, else the method."""
        return self.entry or str(self.result["method"])

    @property
    def settings(self) -> str:
        """What tells it from other runs of its method: the plan, less budget, seeds and speed."""
        if self.entry:
            return ""  # settings that were tuned differ from seed to seed
        table = tomllib.loads(self.plan)
        kept = {key: table[key] for key in table.keys() & {"method", "rounds", "sampler"}}
        return json.dumps(kept, sort_keys=True, default=str)

    @property
    def seed(self) -> int | None:
        """The seed of split and noise, or of the split alone with real noise; None if unknown."""
        table = tomllib.loads(self.plan)
        data = table.get("data")
        split = data.get("split_seed") if isinstance(data, dict) else None
        found = table.get("simulation_seed", split)
        return found if isinstance(found, int) else None

    @property
    def epsilon(self) -> float:
        """Epsilon for the other clients, computed anew.

        Whoever reads a page of runs asks what a client risks by joining. Under a hidden cohort of
        fixed size the guarantee's own epsilon is an outsider's, and smaller. Of a run that was
        chosen privately it is that of whoever sees it alone: what other clients have seen beside
        it is not told by its folder.
        """
        if (chosen := chosen_alone(self.guarantee, self.selection)) is not None:
            return chosen
        return self.guarantee.epsilon

    @property
    def view(self) -> str:
        """Whose view `epsilon` is."""
        if self.selection is not None:
            return CHOSEN_ONLY
        view = view_of(self.guarantee)
        return OTHERS if view == OUTSIDER else view

    @property
    def hides_cohort(self) -> bool:
        """Whether it has a budget and nobody may know who, or how many, took part in a round."""
        return self.private and not self.guarantee.participation.visible

    @property
    def shares(self) -> bool:
        """Whether clients post anything: if not, each of them learns alone."""
        return len(self.guarantee.events) > 0

    @property
    def private(self) -> bool:
        """Whether clients post, and under noise."""
        return self.shares and math.isfinite(self.epsilon)

    @property
    def data(self) -> Any:
        """The plan's choice of data."""
        return tomllib.loads(self.plan).get("data")

    @property
    def deployment(self) -> dict[str, Any]:
        """What it says of how it was deployed; nothing of a simulated run."""
        return dict(self.result.get("deployment") or {})

    @property
    def is_scored(self) -> bool:
        """Whether clients' models were scored: those of a deployment are at its sites alone."""
        return self.result["metric"] is not None

    @property
    def scored(self) -> str:
        """What its metric is called, and which way is better."""
        metric = self.result["metric"]
        if metric is None:
            return _UNSCORED
        way = _DIRECTIONS.get(metric)
        return f"test {metric}" if way is None else f"test {metric} ({way})"

    @property
    def caveats(self) -> tuple[str, ...]:
        """What must be read beside the guarantee."""
        return tuple(map(str, self.result.get("caveats") or ()))

    @property
    def notices(self) -> tuple[str, ...]:
        """What the owner of the data should know of its rows."""
        said = (*(self.result.get("explained") or ()), *(self.result.get("notices") or ()))
        return tuple(map(str, said))

    @property
    def foretold(self) -> tuple[str, ...]:
        """What was said before the run, by public facts alone; nothing of earlier versions."""
        verdict, chosen = self.result.get("verdict"), self.result.get("chosen")
        said = []
        if verdict:
            said.append(
                f"Before the run, by public facts alone, the verdict was {verdict['verdict']}: "
                f"{verdict['words']}."
            )
            # Remedies are sentences, each with its own end.
            help_ = " ".join(map(str, verdict.get("remedies") or ()))
            said += [f"What would help: {help_}"] if help_ else []
            if view_of(self.guarantee) == OUTSIDER:
                said.append(f"Epsilons of that verdict are of {OUTSIDER}.")
        return (*said, f"Picked by auto: {chosen}.") if chosen else tuple(said)

    @property
    def references(self) -> list[dict[str, Any]]:
        """What stands beside the run; nothing in folders of earlier versions."""
        told = self.result.get("references") or []
        return [dict(one) for one in told if one.get("name")]

    @property
    def share_worse_than_alone(self) -> float:
        """Of clients with test rows, how many learn better alone; not-a-number if unknown."""
        if "error_alone" not in self.metrics:
            return math.nan
        known = self.column("test_rows") > 0
        if not known.any():
            return math.nan
        return float((self.column("error") > self.column("error_alone"))[known].mean())

    def number(self, key: str) -> float:
        """Read a number of the summary; null is not-a-number."""
        value = self.result.get(key)
        return math.nan if value is None else float(value)

    def column(self, name: str, *, newcomers: bool = False) -> Array:
        """Read a column of numbers, of clients or of newcomers; null is not-a-number."""
        return _floats((self.newcomers if newcomers else self.metrics)[name])


def read_finished(
    folders: Sequence[Path], names: Mapping[Path, str] | None = None
) -> list[FinishedRun]:
    """Read finished runs, each with a label of its own; `names` are those of a comparison.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If a folder has no finished run or cannot be read.
    """
    entries = names or {}
    return _name([_read(Path(folder), entries.get(Path(folder), "")) for folder in folders])


def _read(folder: Path, entry: str) -> FinishedRun:
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; check the path")
    if not (folder / "result.json").exists():
        raise ValueError(f"{folder} has no finished run; {how_to_finish(folder)}")
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        plan = (folder / "plan.toml").read_text(encoding="utf-8")
        tomllib.loads(plan)
        away = bool(result.get("deployment")) and result["metric"] is None
        metrics = _columns(folder / "metrics.parquet", _COLUMNS, may_lack=away)
        kept = _columns(folder / "history.parquet", _HISTORY, may_lack=True)
        history = {name: _floats(column) for name, column in kept.items()}
        joined = _columns(folder / "newcomers" / "metrics.parquet", _COLUMNS, may_lack=True)
        guarantee = Guarantee.from_json(stated)
        chosen_alone(guarantee, stated.get("selection"))  # refused here, where it says which run
        if missing := _RESULT - result.keys():
            raise ValueError(f"result.json lacks {', '.join(sorted(missing))}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} cannot be read ({type(error).__name__}: {error}); its files are not as "
            "`coterie run` wrote them: run the plan again into a new folder"
        ) from error
    versions = stated.get("versions", {})
    label, read = entry or result["method"], (result, guarantee, plan, versions)
    return FinishedRun(
        folder, label, *read, metrics, history, joined, entry, stated.get("selection")
    )


def _columns(path: Path, needed: set[str], *, may_lack: bool = False) -> dict[str, Any]:
    if may_lack and not path.exists():
        return {}
    with path.open("rb") as file:  # pyarrow takes no path that is not UTF-8
        found: dict[str, Any] = pq.read_table(file).to_pydict()
    if missing := needed - found.keys():
        raise ValueError(f"{path.name} lacks {', '.join(sorted(missing))}")
    return found


def _floats(column: Sequence[Any]) -> Array:
    return np.array([math.nan if x is None else x for x in column], np.float64)


def _name(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return every run a label of its own: the method, with epsilon and seed or number where needed.

    Labels are listed with commas between them, and have none of ours inside.
    """
    methods = Counter(run.label for run in runs)
    several = [run.shares and methods[run.label] > 1 for run in runs]
    told = [
        f"{run.label} at epsilon {round_up(run.epsilon)}" if by_epsilon else run.label
        for run, by_epsilon in zip(runs, several, strict=True)
    ]
    seeds: dict[str, set[int | None]] = {}
    for run, label in zip(runs, told, strict=True):
        seeds.setdefault(label, set()).add(run.seed)
    seeded = [
        label if run.seed is None or len(seeds[label]) == 1 else f"{label} (seed {run.seed})"
        for run, label in zip(runs, told, strict=True)
    ]
    seen: Counter[str] = Counter()
    named = []
    for run, label in zip(runs, seeded, strict=True):
        seen[label] += 1
        named.append(replace(run, label=f"{label} ({seen[label]})" if seen[label] > 1 else label))
    return named
