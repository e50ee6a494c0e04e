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

from coterie.privacy.accounting import Guarantee
from coterie.privacy.words import round_up

Array = NDArray[np.float64]

_RESULT = {"method", "data", "clients", "rounds", "metric", "value", "simulation"}
_COLUMNS = {"client", "train_rows", "test_rows", "error"}
_DIRECTIONS = {"nmse": "smaller is better", "accuracy": "larger is better"}
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
            (`error_local_star`, ...) may be missing.
        history: Columns by name, a row a round; none where the run kept no history.
        newcomers: As metrics, of clients who joined after training; none where nobody did.
        entry: Its name in a comparison, if it is of one.
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
    def epsilon(self) -> float:
        """Epsilon, computed anew."""
        return self.guarantee.epsilon

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
    def scored(self) -> str:
        """What its metric is called, and which way is better."""
        metric = self.result["metric"]
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
            help_ = "; ".join(map(str, verdict.get("remedies") or ()))
            said += [f"What would help: {help_}."] if help_ else []
        return (*said, f"Picked by auto: {chosen}.") if chosen else tuple(said)

    @property
    def references(self) -> list[dict[str, Any]]:
        """What stands beside the run; nothing in folders of earlier versions."""
        told = self.result.get("references") or []
        return [dict(one) for one in told if one.get("name")]

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
        ValueError: If a folder has no finished run or cannot be read.
    """
    entries = names or {}
    return _name([_read(Path(folder), entries.get(Path(folder), "")) for folder in folders])


def _read(folder: Path, entry: str) -> FinishedRun:
    if not (folder / "result.json").exists():
        raise ValueError(
            f"{folder} has no finished run; resume it with `coterie run --resume {folder}`"
        )
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        plan = (folder / "plan.toml").read_text(encoding="utf-8")
        tomllib.loads(plan)
        metrics = _columns(folder / "metrics.parquet", _COLUMNS)
        kept = _columns(folder / "history.parquet", _HISTORY, may_lack=True)
        history = {name: _floats(column) for name, column in kept.items()}
        joined = _columns(folder / "newcomers" / "metrics.parquet", _COLUMNS, may_lack=True)
        guarantee = Guarantee.from_json(stated)
        if missing := _RESULT - result.keys():
            raise ValueError(f"result.json lacks {', '.join(sorted(missing))}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} cannot be read ({type(error).__name__}: {error}); its files are not as "
            "`coterie run` wrote them: run the plan again into a new folder"
        ) from error
    versions = stated.get("versions", {})
    label, read = entry or result["method"], (result, guarantee, plan, versions)
    return FinishedRun(folder, label, *read, metrics, history, joined, entry)


def _columns(path: Path, needed: set[str], *, may_lack: bool = False) -> dict[str, Any]:
    if may_lack and not path.exists():
        return {}
    found: dict[str, Any] = pq.read_table(path).to_pydict()
    if missing := needed - found.keys():
        raise ValueError(f"{path.name} lacks {', '.join(sorted(missing))}")
    return found


def _floats(column: Sequence[Any]) -> Array:
    return np.array([math.nan if x is None else x for x in column], np.float64)


def _name(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Give every run a label of its own: the method, with epsilon and a number where needed."""
    methods = Counter(run.label for run in runs)
    seen: Counter[str] = Counter()
    named = []
    for run in runs:
        label = run.label
        if methods[label] > 1 and run.shares:
            label = f"{label}, epsilon {round_up(run.epsilon)}"
        seen[label] += 1
        named.append(replace(run, label=f"{label} ({seen[label]})" if seen[label] > 1 else label))
    return named
