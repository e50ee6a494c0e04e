"""What `coterie tune --charge` does: a selection among private runs, in words or as JSON."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from coterie.commands.told import Told
from coterie.config import ConfigError
from coterie.privacy.guarantee import round_up
from coterie.privacy.selection import ALL_RUNS, CHOSEN
from coterie.selection import Offer, Progress, Scoring, Selected, offer, select
from coterie.trials import Grid

_ALONE = (
    "Hand on the chosen run's folder alone, which states the first epsilon: how many runs there "
    "were and how they did is not for whoever is told it, and it is not for the other clients."
)


def charge(arguments: argparse.Namespace, table: dict[str, Any], grid: Grid) -> Told:
    """Carry out a selection; nothing is printed here but the bar."""
    if arguments.search != "grid":
        raise ConfigError(
            f"--charge with --search {arguments.search}: proposals that follow from scores are not "
            "covered; settings are drawn from a grid by chance: leave --search out"
        )
    asked: dict[str, Any] = {
        "runs": arguments.runs,
        "eta": arguments.eta,
        "public": arguments.public,
        "scoring": Scoring(
            noise_multiplier=arguments.score_noise,
            bound=arguments.score_bound,
            rows=arguments.validation,
        ),
    }
    if arguments.dry_run:
        return Told(_tell_offer(arguments, offer(table, grid, **asked)))
    folder = Path(arguments.out or "selected")
    bar = _Bar(quiet=arguments.quiet)
    try:
        found = select(table, grid, folder=folder, observe=bar, **asked)
    except KeyboardInterrupt:
        bar.close()
        again = f"interrupted: the same command goes on with {folder}; nothing is drawn anew"
        return Told("", again, 130)
    finally:
        bar.close()
    return Told(_tell(arguments, found))


class _Bar:
    """A progress bar over the runs; how many there are is known to whoever runs them."""

    def __init__(self, *, quiet: bool) -> None:
        self._bar: Bar | None = None
        if not quiet:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("private runs", total=None)
            self._bar.start()

    def __call__(self, progress: Progress) -> None:
        """Show a run that is done."""
        if self._bar is not None:
            told = f"private runs  best noisy score {max(progress.scores):.3g}"
            self._bar.update(
                self._task, total=progress.total, completed=progress.done, description=told
            )

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _refusals(found: Offer) -> list[str]:
    if not found.refused:
        return []
    first = found.refused[0]
    told = f"{len(found.refused)} combinations are refused and never drawn, such as"
    return [f"{told} {_settings(first.settings)}: {first.refused}"]


def _tell_offer(arguments: argparse.Namespace, found: Offer) -> str:
    guarantee = found.guarantee
    foreseen = guarantee.forecast()
    if arguments.json:
        return json.dumps(
            {
                "candidates": found.settings,
                "refused": [
                    {"settings": one.settings, "why": one.refused} for one in found.refused
                ],
                "guarantee": guarantee.to_json(),
                "other_clients": [
                    {"share": one.share, "runs": one.runs, "epsilon": one.epsilon}
                    for one in foreseen
                ],
            },
            allow_nan=False,
        )
    one = round_up(guarantee.of_runs([0]).epsilon)
    lines = [
        f"{len(found.settings)} settings, {guarantee.law.mean:g} runs expected; one run with its "
        f"score: epsilon = {one} at delta = {guarantee.delta:.3g}",
        *_refusals(found),
        "",
        f"{CHOSEN}:",
        f"  epsilon = {round_up(guarantee.chosen_alone)}",
        f"{ALL_RUNS}:",
        *(
            f"  epsilon = {round_up(at.epsilon)} for {at.runs} runs "
            f"({at.share:.0%} of selections make no more)"
            for at in foreseen
        ),
        "",
        "Nothing is spent yet: leave --dry-run out to go on.",
    ]
    return "\n".join(lines)


def _tell(arguments: argparse.Namespace, found: Selected) -> str:
    record = found.record
    if arguments.json:
        told = {key: record[key] for key in ("guarantee", "words", "runs", "note")}
        told |= {"best": found.best, "run": str(found.run), "tuned": found.plan.tuned}
        return json.dumps(told, allow_nan=False)
    best = max(found.scores)
    scored = sorted(
        zip(found.scores, (run["settings"] for run in record["runs"]), strict=True),
        key=lambda pair: -pair[0],
    )
    lines = [
        f"private runs: {len(found.scores)}; noisy score ({arguments.score_bound:g} less the mean "
        "error on rows held back; larger is better)",
        *(f"  {score:.4g}  {_settings(settings)}" for score, settings in scored),
        "",
        f"chosen: {_settings(found.best)} (noisy score {best:.4g})",
        found.guarantee.statement(found.drawn),
        _ALONE,
        f"\nrun {found.run}, look at it: coterie report {shlex.quote(str(found.run))}",
    ]
    return "\n".join(lines)


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} = {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    )
