"""One call per command, for notebooks and scripts: init, plan, run, compare, verify.

Each call does what the command of its name does, and returns an object that shows itself in a
notebook, gives data frames (`to_frame`) and charts (`plot`). A run is what its folder holds: a run
that is opened again is the same object.
"""

import argparse
import math
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from coterie.cli.answer import Answer, answer_facts, answer_plan, chart_of
from coterie.cli.main import build_parser
from coterie.cli.options import new_folder
from coterie.core.config import ConfigError, assign, read_toml, to_table
from coterie.core.progress import Bar
from coterie.core.suggest import did_you_mean
from coterie.data.config import DataConfig, Source
from coterie.data.datasets import NAMES
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.frames import is_frame, like, to_frame
from coterie.data.hub import is_dataset, refusal
from coterie.data.inspect import Proposal, inspect
from coterie.data.load import load, read_columns, source_of
from coterie.engine.models import client_model
from coterie.engine.simulate import Observer, Outcome, bar_of_rounds
from coterie.evaluation.holdout import hold_out
from coterie.evaluation.verdict import Headline
from coterie.methods.auto import Auto
from coterie.planning.about import About
from coterie.planning.advice import Advice
from coterie.planning.plan import Plan, Privacy, Speed, fill_kinds
from coterie.planning.rules import default_method, heed_verdict, resolve
from coterie.privacy.guarantee import Guarantee, round_up, show_delta
from coterie.report import sections
from coterie.report.charts import Figure, can_draw, draw_trade_off
from coterie.report.page import write_report
from coterie.report.read import FinishedRun, read_finished
from coterie.report.screen import as_table, first_screen, scoped, sentences
from coterie.runs.folder import check_rows, claim
from coterie.runs.run import execute
from coterie.runs.summary import promised
from coterie.serve.predict import predict_run
from coterie.tune import compare as comparing
from coterie.tune import frontier
from coterie.verification import Verdict
from coterie.verification import verify as verify_folder
from coterie.verification.signature import read_public

_SECTIONS = {
    "": (Plan, {"method", "privacy", "data", "speed", "charged", "chosen", "simulation_seed"}),
    "privacy.": (Privacy, set[str]()),
    "speed.": (Speed, set[str]()),
    "about.": (About, set[str]()),
    "data.": (DataConfig, {"name", "source"}),
    "data.source.": (Source, {"clip"}),  # `clip` is that of contributions
}
"""The sections of a plan whose settings have names of their own, and the settings left out."""
_PLACES = {
    one.name: f"{section}{one.name}"
    for section, (kind, apart) in _SECTIONS.items()
    for one in fields(kind)
    if one.init and one.name not in apart
}
_OF_SOURCE = [name for name, place in _PLACES.items() if place.startswith("data.source.")]
"""The key of a plan that each setting sets."""
_HEADS = ("epsilon", "verdict", "rounds", "max. parameters", "clients for a small gain", "to join")
_BUDGET = {"epsilon", "noise_multiplier"}
Which = Literal["gains", "clients", "rounds", "privacy"]


# --- data


def init(
    given: Any, *, client: str | None = None, target: str | None = None, **overrides: Any
) -> Proposal:
    """Return a proposal for how to read a table, as `coterie init` makes it.

    It is read off the rows: check it, and pass it on by `ct.load(given, proposal)`, which declares
    its levels, ranges and classes as public. None guesses the column. `overrides` are
    `task`, `features` and `categories`, as the flags of the command.
    """
    return inspect(_path(given), client=client, target=target, **overrides)


def _path(given: Any) -> Any:
    return Path(given) if isinstance(given, str) else given


def _read(given: Any, options: dict[str, Any], name: str | None) -> FederatedDataset:
    """Return data in memory: a dataset as it is, or the rows of a frame."""
    if isinstance(given, FederatedDataset):
        if options:
            raise DataError(
                f"{', '.join(options)}: this dataset has been read already; give these options to "
                "ct.load"
            )
        return given
    if not is_frame(given) and not is_dataset(given):
        raise refusal(given)
    return load(given, options.pop("source", None), name=name, **options)


# --- plans


def _make_plan(given: Any, settings: dict[str, Any]) -> tuple[Plan, FederatedDataset | None]:
    """Return a plan, and the data if it is in memory."""
    table, data = _plan_table(given, settings)
    table["method"].setdefault("kind", "auto")
    fill_kinds(table)
    if not _BUDGET & table["privacy"].keys():
        table["privacy"]["epsilon"] = 1.0
    return Plan.from_table(table), data


def _plan_table(
    given: Any, settings: dict[str, Any]
) -> tuple[dict[str, Any], FederatedDataset | None]:
    """Return a plan's table with settings over it, and the data if it is in memory."""
    settings = {name: value for name, value in settings.items() if value is not None}
    _check_names(settings)
    table, data = _table_of(given, settings)
    table.pop("charged", None)  # of the run that was chosen: another one is not
    for section in ("method", "privacy", "data"):
        table.setdefault(section, {})
    _lay(table, settings)
    if data is not None and "clients" in table["data"]:
        data = data.first(table["data"].pop("clients"))
    return table, data


def _table_of(
    given: Any, settings: dict[str, Any]
) -> tuple[dict[str, Any], FederatedDataset | None]:
    """Return the table of what is to be run, and its data; take their settings away."""
    if isinstance(given, Planned | Plan | str | Path):
        return _table_by_name(given, settings)
    options = {name: settings.pop(name) for name in _OF_SOURCE if name in settings}
    options |= {"source": settings.pop("source")} if "source" in settings else {}
    data = _read(given, options, settings.pop("name", None))
    if data.source is None:
        return {"data": {"name": data.title}}, data
    name = f"{data.title} (in memory)" if data.title in NAMES else data.title
    return {"data": {"name": name, "source": to_table(data.source)}}, data


def _table_by_name(
    given: "Planned | Plan | str | Path", settings: dict[str, Any]
) -> tuple[dict[str, Any], FederatedDataset | None]:
    """Return the table of a plan, a TOML plan, a file or the name of a dataset."""
    data = None
    if isinstance(given, Planned):
        if given.plan is None:
            raise ValueError("this plan was made of numbers: give data, ct.run(data, ...)")
        table, data = given.plan.to_table(), given.data
    elif isinstance(given, Plan):
        table = given.to_table()
    elif str(given).endswith(".toml"):
        table = read_toml(Path(given))
    else:
        table = {"data": {"name": str(given)}}
    if "name" in settings:
        raise ValueError(f"name = {settings['name']!r}: these data have a name; leave it out")
    if "source" in settings:
        table.setdefault("data", {})["source"] = to_table(source_of(settings.pop("source"), {}))
    return table, data


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that does not exist, before any row is read."""
    known = [*_PLACES, "method", "model", "cohort", "seed", "source", "name"]
    for name in settings:
        if name not in known:
            raise ConfigError(f"no setting {name!r}; {did_you_mean(name, known)}")


def _lay(table: dict[str, Any], settings: dict[str, Any]) -> None:
    """Lay settings over a plan's table."""
    _lay_method(table, settings.pop("method", None), settings.pop("model", None))
    seed, cohort = settings.pop("seed", None), settings.pop("cohort", None)
    if seed is not None:
        table["simulation_seed"] = seed
        table["data"].setdefault("split_seed", seed)
    if _BUDGET & settings.keys():
        for name in _BUDGET:
            table["privacy"].pop(name, None)
    for name, value in settings.items():
        assign(table, _PLACES[name], to_table(value))
    if cohort is not None:
        table["sampler"] = {**table.get("sampler", {}), "cohort": cohort}


def _lay_method(table: dict[str, Any], method: Any, model: Any) -> None:
    """Lay a method and a model over a plan's table; each is a name or an object.

    A model may also be a class or function that makes a network, as in `--model nets:Net`.
    """
    if method is not None:
        table["method"] = {"kind": method} if isinstance(method, str) else to_table(method)
    if isinstance(model, str):
        model = {"kind": "module", "make": model} if ":" in model else {"kind": model}
    elif callable(model):
        model = {"kind": "module", "make": model}
    if model is not None:
        table["method"]["model"] = to_table(model)


@dataclass(frozen=True, repr=False)
class Planned:
    """What `coterie plan` computes: whether joining pays, and what it costs.

    Attributes:
        answer: All numbers; `to_dict()` gives them as `coterie plan --json` prints them.
        plan: The plan, if there is data; `ct.run(planned)` runs it.
        data: The data, if it is in memory.
    """

    answer: Answer
    plan: Any = None
    data: FederatedDataset | None = None

    @property
    def advice(self) -> Advice | None:
        """The verdict with its reasons; None where the rule does not apply."""
        return self.answer.advice

    @property
    def verdict(self) -> str | None:
        """Whether joining pays: "join", "small gain" or "learn alone"; None if unknown."""
        return None if self.advice is None else self.advice.verdict

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as `coterie plan --json` prints them."""
        return self.answer.to_json()

    def to_frame(self, kind: str | None = None) -> Any:
        """Return the table by epsilon as a data frame: "pandas", "polars" or "pyarrow"."""
        return to_frame(pa.Table.from_pylist(self.to_dict().get("by_epsilon", [])), kind)

    def plot(self) -> Any:
        """Return epsilon against rounds and noise against clients, as an Altair chart."""
        return chart_of(self.answer)

    def __repr__(self) -> str:
        about = self.answer.about.get("method")
        on = f" for {about}" if about else ""
        if self.advice is None:
            return f"<Planned{on}: no verdict; {self.answer.reason}>"
        advice = self.advice
        budget = "" if advice.epsilon is None else f", epsilon {advice.epsilon:g}"
        return (
            f"<Planned{on}: {advice.verdict}, {advice.clients:,} clients{budget}, "
            f"{advice.parameters:,} shared parameters, {advice.rounds:,} rounds>"
        )

    def _repr_html_(self) -> str:
        if self.advice is None:
            return scoped(f"<p>{escape(self.answer.reason)}.</p>")
        lines = [self.advice.reason, *(f"  {remedy}" for remedy in self.advice.remedies)]
        answer = f'<p class="answer">Verdict: {escape(self.advice.verdict)}.</p>'
        found = [list(row.values()) for row in self.to_dict()["by_epsilon"]]
        rows = [[f"{row[0]:g}", row[1], *(f"{count:,}" for count in row[2:])] for row in found]
        return scoped(answer + sentences(lines) + (as_table(_HEADS, rows) if rows else ""))


def plan(
    data: Any = None,
    *,
    epsilon: float | None = None,
    clients: int | None = None,
    parameters: int | None = None,
    features: int | None = None,
    full: bool = False,
    **settings: Any,
) -> Planned:
    """Return whether joining pays and what it costs, before a budget is spent: `coterie plan`.

    >>> plan(clients=550, parameters=10, epsilon=1)
    <Planned: join, 550 clients, epsilon 1, 10 shared parameters, 44 rounds>

    Args:
        data: A file, a frame, a dataset or its name, or a plan; None to give only numbers.
        epsilon: The budget of the whole run (default 1).
        clients: Number of clients; of data, how many to take from the start.
        parameters: Shared parameters, such as features + 1; without data.
        features: Instead of parameters: features of a linear model without data; of data, which.
        full: Whether to compute values that take some seconds too.
        settings: Without data `rounds`, `cohort`, `delta`, `relation`, `clip`, `task`, `trust`,
            `rows_per_client` and `noise_multiplier`; with data the settings of `run`.
    """
    if data is None:
        if clients is None or parameters is features is None:
            raise ValueError("give data, or numbers: clients, and parameters or features")
        given = {"epsilon": epsilon, "clients": clients, "parameters": parameters}
        return Planned(
            answer_facts(_facts({**given, "features": features, "full": full}, settings))
        )
    if parameters is not None:
        raise ValueError(f"parameters = {parameters}: with data they follow from it; leave it out")
    settings |= {"epsilon": epsilon, "clients": clients, "features": features}
    made, held = _make_plan(data, settings)
    spec = (made.data.open() if held is None else held).spec
    return Planned(answer_plan(made, spec, made.data.name, full=full), made, held)


def _facts(given: Mapping[str, Any], settings: Mapping[str, Any]) -> argparse.Namespace:
    """Return the facts of a plan without data, as the flags of `coterie plan`."""
    for name in settings:
        if name not in _FACTS:
            raise ValueError(f"{name}: give data too, or only {', '.join(_FACTS)}")
    defaults = vars(build_parser().parse_args(["plan"]))
    features = given["features"]
    text = None if features is None else str(features)
    return argparse.Namespace(**{**defaults, **settings, **given, "features": text})


_FACTS = (
    "rounds", "cohort", "delta", "relation", "clip", "noise_multiplier", "sampling", "noise",
    "classes", "task", "rows_per_client", "trust", "minimum_clients", "corrupt", "cohort_visible",
)  # fmt: skip
"""The settings of a plan without data."""


# --- runs


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """A finished run: everything that its folder holds.

    Attributes:
        folder: The run folder; a temporary one is removed with this object.
        outcome: The models and releases in memory; None if the run was opened again.
    """

    folder: Path
    outcome: Outcome | None = None
    _trust: bool = False
    _kept: Any = None
    _data: FederatedDataset | None = None

    @cached_property
    def _read(self) -> FinishedRun:
        (found,) = read_finished([self.folder])
        return found

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee, rebuilt from the certificate."""
        return self._read.guarantee

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole run, against the other clients."""
        return self._read.epsilon

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return self.guarantee.delta

    @property
    def summary(self) -> dict[str, Any]:
        """The summary that `coterie run --json` prints."""
        found = promised(self.guarantee, self._read.selection)
        return {**self._read.result, **found, "run": str(self.folder)}

    @property
    def metric(self) -> str | None:
        """The name of the metric of `score`; None if scores stayed at the sites."""
        found = self._read.result["metric"]
        return None if found is None else str(found)

    @property
    def score(self) -> float:
        """The metric over all test rows; not private."""
        return self._read.number("value")

    @property
    def plan(self) -> Plan:
        """The plan, with all that was chosen by rule."""
        return Plan.load(self.folder / "plan.toml", trust=self._trust)

    def model(self, client: str) -> Any:
        """Return the parameters of one client's model, by its name."""
        return client_model(self.folder, client)

    def to_frame(self, kind: str | None = None) -> Any:
        """Return one row per client as a data frame: "pandas", "polars" or "pyarrow".

        Columns: client, train_rows, test_rows, error, error_local, and the other metrics of the
        task. Not private: it is for those who may see the data.
        """
        found = {_column(name): column for name, column in self._read.metrics.items()}
        return to_frame(pa.table(found), kind)

    def plot(self, which: Which | None = None) -> Any:
        """Return an Altair chart, as in the report.

        "gains": what every client gains over local training (the default); "clients": every
        client's own score; "rounds": round by round; "privacy": the trade-off of any attack.
        """
        return _drawn(self._figure(which)).chart()

    def _figure(self, which: Which | None) -> Figure | None:
        run = self._read
        made = {
            "gains": lambda: sections.gain_charts(run, 1),
            "clients": lambda: sections.distribution_charts([run], [], clients=True),
            "rounds": lambda: list(sections.round_charts([run], clients=True)),
            "privacy": lambda: [draw_trade_off(run.guarantee)] if run.private else [],
        }
        if which is not None and which not in made:
            raise ValueError(f"plot {which!r}: expected one of {', '.join(made)}")
        for name in ("gains", "clients") if which is None else (which,):
            if found := made[name]():
                return found[0]
        return None

    def predict(
        self,
        given: Any,
        *,
        keep: Sequence[str] = (),
        client: str | None = None,
        client_column: str | None = None,
        unknown_clients: Literal["shared", "refuse"] = "shared",
        std: bool = False,
        quantiles: Sequence[float] = (),
    ) -> Any:
        """Predict rows, each by its client's own model, and return a frame of the kind given.

        Columns: row (its number in what is given, from 0), client, those kept, prediction, and for
        classes the probability. A frame of pandas gets the index of its rows.

        Args:
            given: A frame, a file, a dataset or its name. Rows are read as in training; what was
                done to a dataset afterwards, such as `apply_constants`, has to be done to new rows.
            keep: Columns to copy, such as an id.
            client: Treat every row as this client's.
            client_column: The column that names clients, if it differs from that of the training.
            unknown_clients: Use the shared model for clients that the run does not know, or refuse
                them. What was done, and cells that were read as gaps, are warnings.
            std: Whether to add standard deviations (pfeb).
            quantiles: Shares, such as (0.05, 0.95), whose quantiles to add (pfeb, regression).
        """
        found = predict_run(
            self.folder,
            str(given) if isinstance(given, Path) else given,
            client=client,
            client_column=client_column,
            unknown_clients=unknown_clients,
            std=std or bool(quantiles),
            trust=self._trust,
            memory=self._data,
        )
        for note in found.notes:
            warnings.warn(note, stacklevel=2)
        kept = read_columns(_path(given), found.info.source, keep) if keep else None
        table = found.table(kept, quantiles)
        if not is_frame(given):
            return to_frame(table)
        return like(table, given, table["row"].to_pylist())

    def report(self, path: str | Path) -> Path:
        """Write the report, one self-contained HTML page."""
        return write_report([self.folder], Path(path))

    def __repr__(self) -> str:
        run = self._read
        spent = f"epsilon {round_up(self.epsilon)} at delta {show_delta(self.delta)}"
        if not run.shares:
            spent = "nothing is released"
        elif not run.private:
            spent = "NOT PRIVATE"
        local = run.number("local_value") if "local_value" in run.result else math.nan
        beside = "" if math.isnan(local) or not run.shares else f" (local {local:.4g})"
        scored = f"{self.metric} {self.score:.4g}{beside}" if run.is_scored else "not scored here"
        seen = "SIMULATION, " if self.guarantee.simulation else ""
        return (
            f"<Run of {run.name} on {run.result['data']}: {seen}{spent}, {scored}, "
            f"{self.guarantee.clients:,} clients{_place(self.folder, self._kept)}>"
        )

    def _repr_html_(self) -> str:
        """Return the first screen of the report."""
        return first_screen([self._read])


def _place(folder: Path, kept: Any) -> str:
    """Return the folder for a representation, unless it is a temporary one."""
    return f"; {folder}" if kept is None else ""


def _column(name: str) -> str:
    """Return the name of a column for a frame: the local baseline is called so."""
    return f"{name.removesuffix('_alone')}_local" if name.endswith("_alone") else name


def _drawn(figure: Figure | None) -> Figure:
    if not can_draw():
        raise ValueError("plot needs altair, which is not installed: pip install 'coterie[report]'")
    if figure is None:
        raise ValueError("there is nothing to draw: the run kept no such scores, or has no release")
    return figure


def run(  # noqa: PLR0913  (the common settings by name, the others in settings)
    data: Any,
    *,
    epsilon: float | None = None,
    method: Any = None,
    client: str | None = None,
    target: str | tuple[str, ...] | None = None,
    test: float | int | None = None,
    baselines: Sequence[str] | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    anyway: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Run:
    """Train one model per client under a budget: `coterie run`.

    The run is entered in the user's budget register before its first release. With `out`, a
    finished run of the same plan and rows is opened, and an interrupted one is resumed: to execute
    a cell again spends nothing again.

    Args:
        data: A file, a frame of pandas, polars or pyarrow, a dataset or its name, a plan, a TOML
            plan, or what `ct.plan` returned.
        epsilon: The budget of the whole run (default 1); `inf` for no privacy.
        method: A name or a method, e.g. `ct.PMTL(lam=0.3)`; by default one is chosen by rule.
        client: The column that names the client of each row.
        target: The column to predict.
        test: Test rows of each client: a share, or a number.
        baselines: Baselines to score, see `coterie.evaluation.baselines`.
        seed: A simulation seed: reproducible, and protects nobody.
        out: The run folder. By default a run with a budget gets a new one in `runs/`, so that its
            record is not lost; other runs get a temporary one, removed with the object.
        anyway: Whether a method chosen by rule spends the budget even if the verdict is to learn
            alone.
        progress: Whether to show a progress bar; None: in a notebook or on a terminal.
        settings: Any other setting of a plan by its name: of `Source` (levels, dates, missing,
            ...), `DataConfig` (standardise, clients, ...), `Privacy` (delta, noise, clip, ...),
            `Speed`, `About` (unit, purpose, ...) and `Plan` (rounds, ...); `model`, a name, an
            object, or a class of networks; `cohort`; `source` for a whole `Source`, and `name` for
            the data of a frame. `clip` is that of contributions.

    Raises:
        FileExistsError: If `out` holds another run.
        ValueError: If a setting is wrong, or the run would exceed the total of the register.
    """
    named = {"epsilon": epsilon, "method": method, "client": client, "target": target}
    named |= {"test": test, "baselines": baselines, "seed": seed}
    made, held = _make_plan(data, {**settings, **named})
    kept, folder = _folder(made, out)
    if (folder / "result.json").exists():
        _check_same(made, held, folder, anyway=anyway)
        return Run(folder, None, True, None, held)
    with Bar(made.data.name, show=progress) as bar, _how_to_resume(folder, kept):
        result = execute(
            made,
            folder=folder,
            observer=partial(_watch, bar),
            scoring=partial(_score, bar),
            anyway=anyway,
            data=held,
        )
    return Run(folder, result.outcome, True, kept, held)


@contextmanager
def _how_to_resume(folder: Path, kept: Any) -> Iterator[None]:
    """Add to an interruption how to go on, without spending again."""
    try:
        yield
    except KeyboardInterrupt as error:
        if kept is None and folder.exists():
            error.add_note(f"To go on, give the same arguments and out={str(folder)!r}.")
        raise


def _watch(bar: Bar, plan: Plan, data: FederatedDataset) -> Observer:
    bar.update(0, plan.posts, plan.method.kind)
    return bar_of_rounds(bar) or (lambda progress: None)


def _score(bar: Bar, plan: Plan) -> None:
    bar.update(plan.posts, plan.posts, "scoring")


def _folder(plan: Plan, out: str | Path | None) -> tuple[Any, Path]:
    """Return the folder of a run, and what removes it if it is a temporary one."""
    if out is not None:
        return None, Path(out)
    if plan.private and plan.simulation_seed is None:
        method = plan.method
        known = default_method(method, plan.privacy) if isinstance(method, Auto) else None
        return None, new_folder(f"{Path(plan.data.name).stem}-{(known or method).kind}")
    kept = _Temporary()
    return kept, kept.path / "run"


class _Temporary:
    """A folder that is removed with the last object that refers to it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="coterie-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _check_same(plan: Plan, data: FederatedDataset | None, folder: Path, *, anyway: bool) -> None:
    """Raise an error unless a finished run is of this plan and these rows."""
    train, _ = plan.data.split(data)
    if plan.newcomers is not None:
        train, _ = hold_out(train, plan.newcomers, plan.data.split_seed)
    resolved = resolve(plan, train.spec)
    claim(folder, resolved if anyway else heed_verdict(plan, resolved, train.spec))
    check_rows(folder, train)


def open_run(folder: str | Path, *, trust: bool = False) -> Run:
    """Open a finished run again, such as one of `coterie run`.

    `trust` imports and runs the code that a plan of others names.
    """
    found = Run(Path(folder), None, trust)
    _ = found._read  # raises here if there is no finished run
    return found


@dataclass(frozen=True, repr=False)
class Verified(Verdict):
    """The verdict of `ct.verify`, with its checks as a data frame."""

    def to_frame(self, kind: str | None = None) -> Any:
        """Return one row per check as a data frame: "pandas", "polars" or "pyarrow"."""
        return to_frame(pa.Table.from_pylist(self.to_json()["checks"]), kind)


def verify(run: Run | str | Path, *, key: bytes | str | Path | None = None) -> Verified:
    """Recompute the guarantee of a finished run with code of its own: `coterie verify`.

    The verdict is true if every check holds. With a public key (its file, its 64 hexadecimal digits
    or its bytes), the certificate has to be signed by it.
    """
    known = key if key is None or isinstance(key, bytes) else read_public(str(key))
    found = verify_folder(run.folder if isinstance(run, Run) else Path(run), known)
    return Verified(found.folder, found.checks, found.unchecked)


# --- comparisons


@dataclass(frozen=True, repr=False, eq=False)
class Compared:
    """A finished comparison: methods x epsilons x seeds.

    Attributes:
        folder: Its folder, with a run folder for every cell.
        rows: One row per cell, as in `comparison.parquet`.
        found: The frontier, and the tests of all pairs.
    """

    folder: Path
    rows: tuple[comparing.Row, ...]
    found: frontier.Findings
    _kept: Any = None

    @cached_property
    def findings(self) -> list[str]:
        """Sentences about the differences that are larger than noise."""
        return list(frontier.sentences(self.found))

    @property
    def runs(self) -> list[Run]:
        """The finished runs."""
        return [Run(place, None, True, self._kept) for place in comparing.finished(self.folder)]

    def to_frame(self, kind: str | None = None) -> Any:
        """Return one row per cell as a data frame: "pandas", "polars" or "pyarrow"."""
        return to_frame(comparing.table_of(self.rows), kind)

    def plot(self) -> Any:
        """Return the metric against epsilon, one line per method, as an Altair chart."""
        figures = list(sections.frontiers(self._read)) if can_draw() else []
        if can_draw() and not figures:
            raise ValueError(
                "a curve needs scores at two values of epsilon: give epsilons=[1, 4], or see "
                "to_frame() and report()"
            )
        return _drawn(figures[0] if figures else None).chart()

    def report(self, path: str | Path) -> Path:
        """Write the report, one self-contained HTML page."""
        done = comparing.finished(self.folder)
        told: dict[str, Any] = {"findings": self.findings, "headlines": self._headlines}
        return write_report(list(done), Path(path), names=done, **told)

    @property
    def _headlines(self) -> tuple[Headline, ...]:
        return frontier.headlines(self.found)

    @cached_property
    def _read(self) -> list[FinishedRun]:
        done = comparing.finished(self.folder)
        return read_finished(list(done), done)

    def __repr__(self) -> str:
        done = sum(row["status"] == "done" for row in self.rows)
        labels = list(dict.fromkeys(row["label"] for row in self.rows))
        named = ", ".join(labels[:6]) + (", ..." if len(labels) > 6 else "")
        return (
            f"<Compared {named} on {self.rows[0]['data']}: {done} of {len(self.rows)} runs done"
            f"{_place(self.folder, self._kept)}>"
        )

    def _repr_html_(self) -> str:
        """Return the first screen of the report, and the findings."""
        return first_screen(self._read, self._headlines) + scoped(sentences(self.findings))


def compare(
    data: Any,
    *,
    methods: Sequence[Any] | None = None,
    epsilons: Sequence[float] | None = None,
    seeds: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Compared:
    """Compare methods x epsilons x seeds, and test which differences exceed noise.

    It does what `coterie compare` does. A folder that holds the same comparison is continued.

    Args:
        data: As for `run`; a plan may hold what all cells share.
        methods: Names, methods, or tables with kind, label and settings (default local, fedavg,
            pmtl, auto).
        epsilons: Budgets (default 0.5, 1, 2, 4); `inf` for no privacy.
        seeds: How many simulations, or their seeds (default 3).
        out: The folder; by default a temporary one, or a new one in `runs/` for real noise.
        workers: Processes: None for one per core, 0 for this one.
        progress: Whether to show a progress bar; None: in a notebook or on a terminal.
        settings: Settings of all cells, as for `run`, and those of a comparison: repeats, grid,
            search, trials, folds, public, charge.

    Raises:
        FileExistsError: If the folder holds another comparison or a run.
        ValueError: If a setting is wrong, or no cell could be run.
    """
    options = {key: settings.pop(key) for key in _OPTIONS if key in settings}
    options |= {"methods": methods, "epsilons": epsilons, "seeds": seeds}
    table, held = _plan_table(data, settings)
    if table["method"].get("kind") == "auto":  # what a plan says if it names no method
        del table["method"]["kind"]
    given = {key: to_table(value) for key, value in options.items() if value is not None}
    table["compare"] = {**table.get("compare", {}), **given}
    comparison = comparing.make_comparison(table)
    kept, folder = _folder_of(comparison, out)
    if not (folder / comparing.PLAN).exists():
        comparing.claim_folder(folder, comparison)
    elif comparing.read_comparison(folder).to_table() != comparison.to_table():
        raise FileExistsError(f"{folder} holds another comparison; choose another folder")
    for note in comparison.notes:
        warnings.warn(note, stacklevel=2)
    with Bar("comparing", show=progress) as bar, _how_to_resume(folder, kept):
        ended = comparing.carry_out(
            folder,
            workers=comparison.options.workers if workers is None else workers,
            observe=lambda at: bar.update(at.done, at.total),
            data=held,
        )
    rows = comparing.rows_of(comparison.cells(), ended, folder)
    comparing.write_table(folder, rows)
    if not any(row["status"] == "done" for row in rows):
        raise ValueError(f"no cell could be run; {rows[0]['label']}: {rows[0]['status']}")
    return Compared(folder, tuple(rows), frontier.find(rows, folder), kept)


_OPTIONS = ("repeats", "grid", "search", "trials", "folds", "public", "charge")


def _folder_of(comparison: comparing.Comparison, out: str | Path | None) -> tuple[Any, Path]:
    if out is not None:
        return None, Path(out)
    if comparison.real_noise:
        return None, new_folder(f"compare-{Path(comparison.base['data']['name']).stem}")
    kept = _Temporary()
    return kept, kept.path / "comparison"
