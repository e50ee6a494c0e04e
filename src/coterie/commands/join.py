"""What `coterie join` does: newcomers' models from a finished run and their own rows."""

import argparse
import json
from pathlib import Path

from coterie.commands.flags import data_table
from coterie.join import Joined, join
from coterie.privacy.words import round_up
from coterie.run_plan import plan_from_table
from coterie.summary import json_number, promised


def joined(arguments: argparse.Namespace) -> str:
    """Carry out `coterie join`; give what is to be printed."""
    folder, out = Path(arguments.run), Path(arguments.out)
    if (out / "clients.json").exists():
        raise FileExistsError(f"{out} holds models already; choose another --out")
    table = {"data": data_table(arguments), "method": {"kind": "local"}, "privacy": {"epsilon": 1}}
    if "name" not in table["data"]:
        raise ValueError("no data: give --data NAME|FILE with the newcomers' rows")
    found = join(folder, plan_from_table(table).data, out)
    share = found.score.share_better_than(found.alone)
    told = {
        "run": str(folder),
        "newcomers": len(found.names),
        "metric": found.score.metric,
        "value": json_number(found.score.value),
        "alone_value": json_number(found.alone.value),
        "share_better_than_alone": json_number(share),
        "models": str(out),
        **promised(found.guarantee),
        **found.said,
    }
    if arguments.json:
        return json.dumps(told, allow_nan=False)
    return (
        f"{told['newcomers']} newcomers: test {told['metric']} {found.score.value:.4g} joined, "
        f"{found.alone.value:.4g} alone; {share:.0%} are better off than alone (not private)\n"
        f"They posted nothing: what others can learn of them is epsilon 0. The shared model that "
        f"they took is public at epsilon {round_up(found.guarantee.epsilon)} of its own clients.\n"
        f"{_beside(found)}models {out}"
    )


def _beside(found: Joined) -> str:
    """Give what must be read beside that epsilon."""
    lines = found.guarantee.statement().splitlines()
    said = [line for line in lines if line.startswith(("SIMULATION", "NOT "))]
    said += found.said.get("caveats") or []
    tuning = found.said.get("tuning") or "none"
    said += [] if tuning == "none" else [f"Tuning: {tuning}."]
    return "".join(f"{line}\n" for line in said)
