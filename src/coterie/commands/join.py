"""What `coterie join` does: newcomers' models from a finished run and their own rows."""

import argparse
import json
from pathlib import Path

from coterie.commands.flags import data_table
from coterie.evaluation.metrics import json_number
from coterie.join import Joined, choose, join
from coterie.privacy.charged import chosen_alone
from coterie.privacy.words import round_up
from coterie.summary import promised


def joined(arguments: argparse.Namespace) -> str:
    """Carry out `coterie join`; give what is to be printed."""
    folder, out = Path(arguments.run), Path(arguments.out)
    if (out / "clients.json").exists():
        raise FileExistsError(f"{out} holds models already; choose another --out")
    table = data_table(arguments)
    if "name" not in table:
        raise ValueError("no data: give --data NAME|FILE with the newcomers' rows")
    found = join(folder, choose(folder, table), out)
    share = found.score.share_better_than(found.alone)
    told = {
        "run": str(folder),
        "newcomers": len(found.names),
        "took_part": None if found.known is None else len(found.known),
        "metric": found.score.metric,
        "value": json_number(found.score.value),
        "alone_value": json_number(found.alone.value),
        "share_better_than_alone": json_number(share),
        "models": str(out),
        **promised(found.guarantee, found.selection),
        **found.said,
    }
    if arguments.json:
        return json.dumps(told, allow_nan=False)
    count = "1 newcomer" if len(found.names) == 1 else f"{len(found.names)} newcomers"
    return (
        f"{count}: test {told['metric']} {found.score.value:.4g} joined, "
        f"{found.alone.value:.4g} alone; {share:.0%} are better off than alone (not private)\n"
        f"{_learnt(found)}\n{_beside(found)}models {out}"
    )


def _learnt(found: Joined) -> str:
    """Say what others can learn of the newcomers, and of those whom they join."""
    chosen = chosen_alone(found.guarantee, found.selection)
    epsilon = round_up(found.guarantee.for_others.epsilon if chosen is None else chosen)
    public = f"The shared model that they took is public at epsilon {epsilon} of its own clients."
    nothing = "They posted nothing: what others can learn of them is epsilon 0"
    if found.known is None:
        return f"{nothing}, if they did not take part in the run. {public}"
    if not found.known:
        return f"{nothing}. {public}"
    count, total = len(found.known), len(found.names)
    those = "All of these" if count == total else f"{count} of these"
    rest = "" if count == total else " Of the others, who posted nothing, it is epsilon 0."
    return (
        f"{those} bear names of clients that were trained with (such as {found.known[0]!r}): what "
        f"others can learn of a client that took part is the run's epsilon {epsilon}, and joining "
        f"adds nothing to it.{rest} {public}"
    )


def _beside(found: Joined) -> str:
    """Return what must be read beside that epsilon."""
    lines = found.guarantee.statement().splitlines()
    said = [line for line in lines if line.startswith(("SIMULATION", "NOT "))]
    said += found.said.get("caveats") or []
    tuning = found.said.get("tuning") or "none"
    said += [] if tuning == "none" else [f"Tuning: {tuning}."]
    return "".join(f"{line}\n" for line in said)
