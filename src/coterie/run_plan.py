"""The plan of a run: everything that decides it, as a value, as tables and as plan.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from coterie.choice import DataChoice
from coterie.config import ConfigError, from_table, to_table, to_toml
from coterie.data.federated import Spec
from coterie.engines.clock import Stragglers
from coterie.engines.simulate import Speed
from coterie.evaluation.baselines import check_baselines
from coterie.full_disks import how_to_finish
from coterie.methods.base import Method
from coterie.plan import Plan, Privacy
from coterie.privacy.charged import Charged
from coterie.privacy.files import write_atomically
from coterie.privacy.sampling import Poisson, Sampler
from coterie.rules import Advice, advice_for, settle
from coterie.summary import TunedOn


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that decides a run; written to plan.toml.

    `rounds = None` is resolved by `resolve` before anything is spent. `tuned` says on which rows
    settings were chosen: "public" cost nothing, "charged" was paid for (`coterie.selection`), "not
    covered" is private rows, and is shown wherever epsilon is. `charged` is of a run that is one of
    a selection, and of no other. `stragglers` puts clients on a
    virtual clock; `history` scores every round on test rows (always with a
    clock; None: where that is cheap). `newcomers` (a
    share, or a number of clients) are held out of training by data.split_seed, and join afterwards.
    `chosen` says why the method was picked, where it was left to rules. `baselines` are
    scored with the run, see `coterie.evaluation.baselines`.
    """

    data: DataChoice
    method: Method
    privacy: Privacy
    sampler: Sampler = field(default_factory=Poisson)
    rounds: int | None = None
    simulation_seed: int | None = None
    speed: Speed = field(default_factory=Speed)
    compare_with_local: bool = True
    baselines: tuple[str, ...] = ("local",)
    tuned: TunedOn = "no"
    charged: Charged | None = None
    stragglers: Stragglers | None = None
    history: bool | None = None
    newcomers: int | float | None = None
    chosen: str = ""

    def __post_init__(self) -> None:
        check_baselines(self.baselines)
        if self.simulation_seed is not None and self.simulation_seed < 0:
            raise ValueError(
                f"simulation_seed = {self.simulation_seed}: expected a whole number >= 0"
            )

    def plan(self) -> Plan:
        """Return the part that owns the guarantee."""
        if self.rounds is None:
            raise ValueError("rounds are not resolved yet: call resolve(run_plan, spec) first")
        return Plan(
            method=self.method,
            privacy=self.privacy,
            sampler=self.sampler,
            rounds=self.rounds,
            simulation_seed=self.simulation_seed,
            tuned=self.tuned,
        )


def resolve(run_plan: RunPlan, spec: Spec) -> RunPlan:
    """Fill in what was left to rules, so that plan.toml says it all."""
    settled = settle(run_plan.method, run_plan.privacy, run_plan.sampler, spec, run_plan.rounds)
    return replace(
        run_plan,
        method=settled.method,
        privacy=settled.privacy,
        rounds=settled.rounds,
        chosen=settled.chosen or run_plan.chosen,
    )


def advice_of(run_plan: RunPlan, spec: Spec) -> Advice | None:
    """Return whether joining pays under a resolved plan; None where the rule knows nothing of it."""
    return advice_for(run_plan.method, run_plan.privacy, run_plan.sampler, spec, run_plan.rounds)


def load_plan(path: Path) -> RunPlan:
    """Read a plan.toml.

    Raises:
        ConfigError: If it cannot be read or does not fit.
    """
    return plan_from_table(read_toml(path))


def plan_from_table(table: Mapping[str, Any]) -> RunPlan:
    """Build a run plan from plain tables; unknown keys are refused."""
    _refuse_settings(table.get("method"))
    return from_table(RunPlan, table, "plan")


def _refuse_settings(method: Any) -> None:
    """Say what is wrong with settings of a method that is still to be picked."""
    if not isinstance(method, dict):
        return
    _refuse_settings(method.get("base"))
    given = sorted(set(method) - {"kind", "model"})
    if method.get("kind") == "auto" and given:
        raise ConfigError(
            f"method.{given[0]} was set, but no method is named: auto picks one by rule and has no "
            "settings of its own but the model; name the method that is meant (--method pmtl)"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; say where it is broken."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if not path.parent.exists():
            raise ConfigError(f"{path.parent}: no such folder; check the path") from error
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def assign(table: dict[str, Any], path: str, value: Any) -> None:
    """Set a value of a plan's table by its dotted path, such as `method.lam`."""
    *sections, key = path.split(".")
    place = table
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{path}: {section} is not a table of the plan")
    place[key] = value


def lay_kinds(table: Mapping[str, Any]) -> None:
    """Fill in the kinds of model and sampler where a plan's table has settings of them alone."""
    method = table.get("method")
    model = method.get("model") if isinstance(method, dict) else None
    usual = Method.choices().get(method.get("kind", "auto")) if isinstance(method, dict) else None
    named = "linear" if usual is None else usual().model.kind
    for place, kind in ((model, named), (table.get("sampler"), "poisson")):
        if isinstance(place, dict):
            place.setdefault("kind", kind)


def claim(folder: Path, run_plan: RunPlan) -> None:
    """Make the folder this run's own, or make sure that it is."""
    text = to_toml(_table(run_plan))
    path = folder / "plan.toml"
    parts = ("ledger.jsonl", "posts", "posts.npz", "personal", "models", "result.json")
    if not path.exists() and any((folder / part).exists() for part in parts):
        raise FileExistsError(
            f"{folder} holds parts of a run without its plan.toml; choose another folder"
        )
    if path.exists():
        if not _is_same(read_toml(path), tomllib.loads(text)):
            raise FileExistsError(
                f"{folder} holds a run of another plan; {how_to_finish(folder)}, or choose another "
                f"folder{_unspent(folder)}"
            )
        return
    write_atomically(path, text.encode())


def _unspent(folder: Path) -> str:
    """Say of a folder with no charge in its ledger, and no result, that it may go."""
    if (folder / "result.json").exists():
        return ""
    try:
        charged = b'"charge"' in (folder / "ledger.jsonl").read_bytes()
    except FileNotFoundError:
        charged = False
    return "" if charged else "; nothing was charged in this one: it may be removed"


def check_charged(run_plan: RunPlan, folder: Path | None) -> None:
    """Refuse to begin a run of a selection anywhere else: its epsilon would leave the posts out.

    Raises:
        ValueError: If the plan is that of a chosen run, and the folder is not of a selection.
    """
    if run_plan.charged is None:
        return
    begun = folder is not None and (folder / "plan.toml").exists()
    if not begun and (folder is None or not (folder.parent.parent / "selection.json").exists()):
        raise ValueError(
            "charged: the plan is of a run that a selection made, and the choice was of its posts "
            "alone; to run its settings again, leave the table [charged] out: the new run's "
            "epsilon comes on top"
        )


def _is_same(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Compare plans as tables; one of an older version leaves out what was not known then."""
    usual = {setting.name: setting.default for setting in fields(RunPlan)}
    if kept.get("history") is False and "history" not in asked:
        # Said by every plan of before it could be left open.
        kept = {key: value for key, value in kept.items() if key != "history"}
    unsaid = {key: asked[key] for key in asked.keys() - kept.keys() if asked[key] == usual[key]}
    return {**kept, **unsaid} == asked


def _table(run_plan: RunPlan) -> dict[str, Any]:
    table = to_table(run_plan)
    assert isinstance(table, dict)
    return table
