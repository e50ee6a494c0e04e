"""The one reader of finished runs, and groups of runs that differ in their seed alone.

See `coterie.runs.run` for the files of a run folder.
"""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from coterie.core.files import how_to_resume
from coterie.evaluation.baselines import Paired
from coterie.evaluation.metrics import METRICS, average, is_higher_better
from coterie.evaluation.verdict import Verdict, clear_side, of_summary
from coterie.privacy.guarantee import Guarantee, round_up, view_of
from coterie.privacy.selection import CHOSEN_ONLY, chosen_alone

Array = NDArray[np.float64]

_RESULT = {"method", "data", "clients", "rounds", "metric", "value", "simulation"}
_COLUMNS = {"client", "train_rows", "test_rows", "error"}
_SETTINGS = {"method", "rounds", "sampler"}
LOCAL = "local training"
"""What a verdict compares with."""
_AUDIT = {"claimed", "lower_bound", "confidence", "holds", "trials", "bounds", "errors"}
_HISTORY = {"round", "seconds", "answered", "value"}


@dataclass(frozen=True)
class Part:
    """Leaves of a run's releases that are clipped together, over all rounds.

    Attributes:
        leaves: Their names.
        norm: The order of the bounded norm, 1 or 2; None without a bound.
        bounds: The smallest and the largest bound on one client's contribution, if any.
        noise: The smallest and the largest standard deviation of the noise of one number.
    """

    leaves: tuple[str, ...]
    norm: int | None
    bounds: tuple[float, float] | None
    noise: tuple[float, float]


@dataclass(frozen=True)
class FinishedRun:
    """The content of a finished run folder.

    Attributes:
        folder: The run folder.
        label: Its name among other runs.
        result: The summary.
        guarantee: Rebuilt from its events, so that epsilon is recomputed.
        plan: The text of plan.toml.
        versions: Of the software that wrote the certificate.
        metrics: Columns by name, one row per client; `error_alone` and the errors of baselines
            (`error_local_star`, ...) may be missing. Empty for a deployment whose scores stayed at
            its sites.
        history: Columns by name, one row per round; empty where the run kept no history.
        held_out: As metrics, of held-out clients; empty where there are none.
        entry: Its label in a comparison, if it is part of one.
        selection: The part of its certificate on the private selection that chose it, if any.
        audit: What `coterie audit` found of its plan, if it was run.
        certificate: All of guarantee.json; nothing of it is checked here.
        parts: The bounds and the noise of its releases; empty where the summary has none.
        slug: Its name in names of files: method, epsilon, and seed or number where needed.
    """

    folder: Path
    label: str
    result: dict[str, Any]
    guarantee: Guarantee
    plan: str
    versions: dict[str, str]
    metrics: dict[str, Any]
    history: dict[str, Array]
    held_out: dict[str, Any] = field(default_factory=dict)
    entry: str = ""
    selection: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    certificate: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    slug: str = ""

    @cached_property
    def table(self) -> dict[str, Any]:
        """The plan."""
        return tomllib.loads(self.plan)

    @property
    def name(self) -> str:
        """The name of runs that belong together: a comparison's label, else the method."""
        return self.entry or str(self.result["method"])

    @property
    def settings(self) -> str:
        """What distinguishes it from other runs of its method: plan without budget and seeds."""
        if self.entry:
            return ""  # settings that were tuned differ from seed to seed
        kept = {key: self.table[key] for key in self.table.keys() & _SETTINGS}
        return json.dumps(kept, sort_keys=True, default=str)

    @property
    def seed(self) -> int | None:
        """The seed of split and noise, or of the split alone with real noise; None if unknown."""
        split = self.data.get("split_seed") if isinstance(self.data, dict) else None
        found = self.table.get("simulation_seed", split)
        return found if isinstance(found, int) else None

    @cached_property
    def epsilon(self) -> float:
        """Epsilon against the other clients, recomputed once: pages of many runs ask often.

        Of a run that was selected privately: epsilon against an adversary who sees this run only.
        """
        if (chosen := chosen_alone(self.guarantee, self.selection)) is not None:
            return chosen
        return self.guarantee.epsilon

    @property
    def view(self) -> str:
        """The adversary that `epsilon` refers to."""
        if self.selection is not None:
            return CHOSEN_ONLY
        return view_of(self.guarantee)

    @property
    def hides_cohort(self) -> bool:
        """Whether it has a budget and the cohort of a round is hidden."""
        return self.private and not self.guarantee.participation.visible

    @property
    def shares(self) -> bool:
        """Whether clients release anything; if not, this is local training."""
        return len(self.guarantee.events) > 0

    @property
    def private(self) -> bool:
        """Whether clients release something, and with noise."""
        return self.shares and math.isfinite(self.epsilon)

    @property
    def data(self) -> Any:
        """The plan's data table."""
        return self.table.get("data")

    @property
    def deployment(self) -> dict[str, Any]:
        """How it was deployed; empty for a simulated run."""
        return dict(self.result.get("deployment") or {})

    @property
    def is_scored(self) -> bool:
        """Whether clients' models were scored; those of a deployment stay at its sites."""
        return self.result["metric"] is not None

    @property
    def scored(self) -> str:
        """The title of its metric, with its direction."""
        return metric_title(self.result["metric"])

    @property
    def client_error(self) -> str:
        """The name of a client's own error; its unit differs from that of the metric."""
        metric = METRICS.get(self.result["metric"])
        return "error" if metric is None else metric.client_error

    @property
    def caveats(self) -> tuple[str, ...]:
        """Restrictions of the guarantee."""
        return tuple(map(str, self.result.get("caveats") or ()))

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes on the rows, for the owner of the data."""
        return tuple(map(str, self.result.get("notices") or ()))

    @property
    def settings_chosen(self) -> tuple[str, ...]:
        """What was chosen by rule before the run, and what its noise does; all public."""
        chosen = self.result.get("chosen")
        said = [f"Chosen by auto: {_sentence(chosen)}"] if chosen else []
        return (*said, *map(str, self.result.get("explained") or ()))

    @property
    def forecast(self) -> dict[str, Any]:
        """The verdict before the run, from public facts only; empty where there is none."""
        return dict(self.result.get("verdict") or {})

    @cached_property
    def verdict(self) -> Verdict | None:
        """How its clients fare, compared with local training; None if that is not known."""
        if not self.shares:
            return None
        found = of_summary(self.result, "local", LOCAL)
        if found is not None or "error_alone" not in self.metrics:
            return found
        known = self.column("test_rows") > 0
        paired = Paired.between(self.column("error")[known], self.column("error_alone")[known])
        return verdict_of(paired, int(known.sum()))

    @property
    def baselines(self) -> list[dict[str, Any]]:
        """The comparisons with baselines."""
        return [dict(one) for one in self.result.get("references") or [] if one.get("name")]

    def number(self, key: str) -> float:
        """Return a number of the summary; null is not-a-number."""
        value = self.result.get(key)
        return math.nan if value is None else float(value)

    def column(self, name: str, *, held_out: bool = False) -> Array:
        """Return a column of numbers, of clients or of held-out clients; null is not-a-number."""
        return _floats((self.held_out if held_out else self.metrics)[name])


def verdict_of(paired: Paired, clients: int) -> Verdict | None:
    """Return the verdict on a comparison of clients with local training; None without clients."""
    if not clients:
        return None
    side = clear_side(paired.t, clients)
    return Verdict(side, paired.better, paired.worse, clients, LOCAL)


def metric_title(name: str | None) -> str:
    """Return the title of a headline metric for the head of a table, with its direction."""
    if name is None:
        return "test metric (kept at the sites)"
    metric = METRICS.get(name)
    return f"test {name}" if metric is None else f"test {metric.title} ({metric.direction})"


def _sentence(text: Any) -> str:
    words = str(text).strip()
    return words if words.endswith(".") else f"{words}."


def read_finished(
    folders: Sequence[Path], names: Mapping[Path, str] | None = None
) -> list[FinishedRun]:
    """Return finished runs, each with a unique label; `names` are those of a comparison.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If a folder has no finished run or cannot be read.
    """
    entries = names or {}
    return _name([_read(Path(folder), entries.get(Path(folder), "")) for folder in folders])


def read_summary(folder: Path) -> tuple[dict[str, Any], dict[str, Any], Guarantee]:
    """Return result.json, the certificate, and the guarantee rebuilt from it.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If the folder has no finished run or a file is damaged.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; check the path")
    if not (folder / "result.json").exists():
        raise ValueError(f"{folder} has no finished run; {how_to_resume(folder)}")
    with _readable(folder):
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        guarantee = Guarantee.from_json(stated)
        chosen_alone(guarantee, stated.get("selection"))  # checked here, where the run is known
        if missing := _RESULT - result.keys():
            raise ValueError(f"result.json lacks {', '.join(sorted(missing))}")
    return result, stated, guarantee


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise one ValueError that names the run for whatever is wrong with its files."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())  # in one line
        raise ValueError(
            f"{folder} cannot be read ({type(error).__name__}: {why}): its files are not as "
            "`coterie run` wrote them; restore them (result.json, guarantee.json), or run the plan "
            "again into a new folder"
        ) from error


def _read(folder: Path, entry: str) -> FinishedRun:
    result, stated, guarantee = read_summary(folder)
    with _readable(folder):
        plan = (folder / "plan.toml").read_text(encoding="utf-8")
        tomllib.loads(plan)
        at_sites = bool(result.get("deployment")) and result["metric"] is None
        metrics = _columns(folder / "metrics.parquet", _COLUMNS, may_lack=at_sites)
        kept = _columns(folder / "history.parquet", _HISTORY, may_lack=True)
        held_out = _columns(folder / "newcomers" / "metrics.parquet", _COLUMNS, may_lack=True)
        audit = folder / "audit.json"
        audited = json.loads(audit.read_text(encoding="utf-8")) if audit.exists() else None
        if audited is not None and (missing := _AUDIT - audited.keys()):
            raise ValueError(f"audit.json lacks {', '.join(sorted(missing))}")
        parts = _parts(result.get("reviewer") or {})
    return FinishedRun(
        folder=folder,
        label=entry or result["method"],
        result=result,
        guarantee=guarantee,
        plan=plan,
        versions=stated.get("versions", {}),
        metrics=metrics,
        history={name: _floats(column) for name, column in kept.items()},
        held_out=held_out,
        entry=entry,
        selection=stated.get("selection"),
        audit=audited,
        parts=parts,
        certificate=stated,
    )


def _parts(stated: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of all releases that the summary lists; raise ValueError for odd ones."""
    found: dict[tuple[tuple[str, ...], int | None], tuple[list[float], list[float]]] = {}
    for part in (part for release in stated.get("releases") or () for part in release["parts"]):
        if part["norm"] not in (None, 1, 2):
            raise ValueError(f"norm = {part['norm']!r} of a release: expected 1, 2 or null")
        bounds, noise = found.setdefault((tuple(map(str, part["leaves"])), part["norm"]), ([], []))
        noise.append(float(part["noise"]))
        bounds += [] if part["bound"] is None else [float(part["bound"])]
    return tuple(
        Part(leaves, norm, (min(bounds), max(bounds)) if bounds else None, (min(noise), max(noise)))
        for (leaves, norm), (bounds, noise) in found.items()
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
    """Return runs with unique labels: the method, with epsilon, seed or number where needed.

    Labels are listed with commas between them, so no suffix contains a comma.
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
    return _slugged(named)


def _slugged(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs with unique names for files, which say method and epsilon."""
    found, taken = [], set[str]()
    for run in runs:
        label = run.label.replace(f" at epsilon {round_up(run.epsilon)}", "")
        budget = f"-epsilon-{round_up(run.epsilon)}" if run.private else "-not-private"
        whole = slug_of(label) + (budget if run.shares else "")
        slug, further = whole, count(2)
        while slug in taken:
            slug = f"{whole}-{next(further)}"
        taken.add(slug)
        found.append(replace(run, slug=slug))
    return found


def slug_of(text: str) -> str:
    """Return a name for a file, of plain letters, digits and dashes.

    >>> slug_of("finetune(PMTL, how=mean)")
    'finetune-pmtl-how-mean'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:60].strip("-") or "run"


def listed(labels: Sequence[str], most: int = 6) -> str:
    """Return a few labels, and the number of the others.

    >>> listed(["a", "b"]), listed(list("abcdefgh"))
    ('a, b', 'a, b, c, d, e and 3 more')
    """
    if len(labels) <= most:
        return ", ".join(labels)
    return f"{', '.join(labels[: most - 1])} and {len(labels) - most + 1} more"


APART = 8
"""A page of more runs than this shows groups of runs, and a few runs one by one."""
_ONE_BY_ONE = 6


@dataclass(frozen=True)
class Group:
    """Runs of one method at one epsilon on one dataset."""

    label: str
    runs: tuple[FinishedRun, ...]

    @property
    def first(self) -> FinishedRun:
        """The run that represents the group."""
        return self.runs[0]

    def mean(self, key: str) -> float:
        """Return the mean over runs of a number of the summary."""
        return float(np.mean([run.number(key) for run in self.runs]))

    def error(self, key: str, own: str) -> float:
        """Return the standard error over clients and runs; `own` is the key of one run's error."""
        values, errors = ([run.number(name) for run in self.runs] for name in (key, own))
        return average(values, errors)[1]

    @property
    def verdict(self) -> Verdict | None:
        """How clients fare on average over the runs, compared with local training."""
        if len(self.runs) == 1:
            return self.first.verdict
        if not self.first.shares or any("error_alone" not in run.metrics for run in self.runs):
            return None
        found = [_errors_by_client(run) for run in self.runs]
        names = sorted(set.intersection(*(set(one) for one in found)))
        if not names:
            return None
        own = [run.verdict for run in self.runs]
        both = np.array([[one[name] for name in names] for one in found]).mean(axis=0)
        mean = verdict_of(Paired.between(both[:, 0], both[:, 1]), len(names))
        if mean is None or any(one is None for one in own):
            return None
        better, worse = (
            float(np.mean([getattr(one, side) for one in own])) for side in ("better", "worse")
        )
        return replace(mean, better=better, worse=worse, seeds=len(own))

    @property
    def badness(self) -> float:
        """The metric, signed so that smaller is better; infinite where there is none."""
        value = self.mean("value") * (-1 if is_higher_better(self.first.result["metric"]) else 1)
        return math.inf if math.isnan(value) else value


def _errors_by_client(run: FinishedRun) -> dict[str, tuple[float, float]]:
    """Return each client's error and that of its local model, of clients with test rows."""
    columns = (run.column(name).tolist() for name in ("test_rows", "error", "error_alone"))
    rows = zip(map(str, run.metrics["client"]), *columns, strict=True)
    return {client: (own, local) for client, known, own, local in rows if known > 0}


def group(runs: Sequence[FinishedRun]) -> list[Group]:
    """Return groups of runs that differ in their seed alone."""
    found: dict[tuple[str, ...], list[FinishedRun]] = {}
    for run in runs:
        spent = round_up(run.epsilon) if run.shares else "0"
        of = str(run.result["data"]), run.result["metric"]
        found.setdefault((run.name, spent, *of, run.settings), []).append(run)
    methods = [key[0] for key in found]
    several = len({key[2] for key in found}) > 1
    labels = [_label(key, methods.count(key[0]) > 1, several) for key in found]
    # The same method at the same epsilon with other settings gets a number.
    numbered = [
        f"{label} ({labels[: place + 1].count(label)})" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]
    return [
        Group(label, tuple(together))
        for label, together in zip(numbered, found.values(), strict=True)
    ]


def _label(key: tuple[str, ...], by_epsilon: bool, by_data: bool) -> str:
    name, spent, data, *_ = key
    label = f"{name} at epsilon {spent}" if by_epsilon and spent != "0" else name
    return f"{label} on {data}" if by_data else label


def are_grouped(runs: Sequence[FinishedRun]) -> bool:
    """Return whether tables show groups: for many runs, and for a comparison."""
    return len(runs) > APART or any(run.entry for run in runs)


def rows_of(runs: Sequence[FinishedRun]) -> list[Group]:
    """Return one group per row of a table: groups of runs, or each run by itself."""
    if are_grouped(runs):
        return group(runs)
    return [Group(run.label, (run,)) for run in runs]


def named(some: Sequence[FinishedRun], runs: Sequence[FinishedRun]) -> str:
    """Return the names of some of a page's runs; a complete group by its name."""
    if not are_grouped(runs):
        return listed([run.label for run in some])
    meant, labels = {id(run) for run in some}, []
    for one in group(runs):
        inside = [run.label for run in one.runs if id(run) in meant]
        labels += [one.label] if len(inside) == len(one.runs) else inside
    return listed(labels)


def one_by_one(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs to show one by one: of many, the first of each of the best groups.

    Runs with a budget come before runs without.
    """
    if len(runs) <= APART:
        return list(runs)
    best = sorted(group(runs), key=lambda one: (not one.first.private, one.badness))
    kept = {id(one.first) for one in best[:_ONE_BY_ONE]}
    return [run for run in runs if id(run) in kept]
