"""`coterie onboard`: models for new clients from a finished run and their own rows."""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import (
    JSON,
    TRUST,
    Commands,
    add_source,
    check_flags,
    check_run,
    command,
    print_json,
)

if TYPE_CHECKING:
    from coterie.serve.onboard import Onboarded


def add(commands: Commands) -> None:
    """Add `onboard`, and `join` as a hidden alias."""
    parser = command(
        commands,
        "onboard",
        "compute models for clients who arrive after training; they release nothing",
        "coterie onboard runs/har-mtlsvm --data new.npz --out new-clients",
        "Rows are read and scaled as in training; settings that contradict its plan are refused.\n"
        "`coterie predict RUN` then knows the new clients; so does `coterie predict DIR`.",
        flags=TRUST | JSON,
        usual="--data --client-column --target --out --json",
        action=onboard,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run")
    add_source(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="where to write the models (default: RUN/onboarded)"
    )
    commands._name_parser_map["join"] = parser  # the command's former name


def onboard(arguments: argparse.Namespace) -> int:
    """Carry out `coterie onboard`."""
    folder = check_run(arguments.run, "plan.toml")
    check_flags(arguments)
    from coterie.cli.flags import data_table
    from coterie.runs.summary import promised
    from coterie.serve import onboard as library

    out = library.new_place(folder) if arguments.out is None else Path(arguments.out)
    if (out / "clients.json").exists():
        raise FileExistsError(f"{out} already holds models; choose another --out")
    table = data_table(arguments)
    if "name" not in table:
        raise ValueError("no data: give --data NAME|FILE with the new clients' rows")
    choice = library.choose(folder, table)
    found = library.onboard(folder, choice, out, trust=arguments.trust)
    for note in found.read:
        print(f"coterie onboard: {note}", file=sys.stderr)
    share = found.score.share_better_than(found.local)
    summary: dict[str, Any] = {
        "run": str(folder),
        "clients": len(found.names),
        "took_part": None if found.known is None else len(found.known),
        "metric": found.score.metric,
        "value": found.score.value,
        "local_value": found.local.value,
        "share_better_than_local": share,
        "models": str(out),
        **promised(found.guarantee, found.selection),
        **found.notes,
    }
    if arguments.json:
        print_json(summary)
        return 0
    count = "1 new client" if len(found.names) == 1 else f"{len(found.names)} new clients"
    scores = (
        f"test {found.score.metric} {found.score.value:.4g} onboarded, {found.local.value:.4g} "
        f"local; {share:.0%} are better than the local baseline (not private)"
    )
    scores = "not scored: no client has enough rows" if math.isnan(found.score.value) else scores
    print(f"{count}: {scores}\n{_privacy(found)}\n{_notes(found)}models {out}")
    return 0


def _privacy(found: "Onboarded") -> str:
    """Return sentences on the privacy of the new clients and of the clients of the run."""
    from coterie.privacy.guarantee import round_up
    from coterie.privacy.selection import chosen_alone

    chosen = chosen_alone(found.guarantee, found.selection)
    epsilon = round_up(found.guarantee.epsilon if chosen is None else chosen)
    public = f"The shared parameters that they use cost the clients of the run epsilon {epsilon}."
    nothing = "They release nothing: their privacy cost is epsilon 0"
    if found.known is None:
        return f"{nothing}, if they did not take part in the run. {public}"
    if not found.known:
        return f"{nothing}. {public}"
    count, total = len(found.known), len(found.names)
    those = "All of them" if count == total else f"{count} of them"
    rest = "" if count == total else " The others release nothing: their cost is epsilon 0."
    return (
        f"{those} have names of clients that took part in training (such as {found.known[0]!r}): "
        f"their privacy cost is the run's epsilon {epsilon}, and onboarding adds nothing.{rest} "
        f"{public}"
    )


def _notes(found: "Onboarded") -> str:
    """Return the caveats of that epsilon."""
    lines = found.guarantee.statement().splitlines()
    notes = [line for line in lines if line.startswith(("SIMULATION", "NOT "))]
    notes += found.notes.get("caveats") or []
    tuning = found.notes.get("tuning") or "none"
    notes += [] if tuning == "none" else [f"Tuning: {tuning}."]
    return "".join(f"{line}\n" for line in notes)
