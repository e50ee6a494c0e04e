"""`coterie deploy demo`: a federation on this machine, from keys to a report."""

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

from coterie.commands.options import Commands, _command

_MORE = """\
Four sites with a file of rows each (school districts of Michigan), a SuperLink and four SuperNodes
over TLS with keys, PMTL, epsilon by view, a report, and everything stopped again. The folder keeps
the app, the run (`coterie verify`, `coterie report`) and what each site keeps of its own.

--json prints the run's result.json, with the sites' scores."""


def add_demo(commands: Commands) -> None:
    """Add `demo`."""
    parser = _command(
        commands,
        "demo",
        "a federation on this machine: SuperLink, four SuperNodes, TLS, keys, a report",
        "coterie deploy demo --trust secure_aggregation",
        _MORE,
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/federation", help="default runs/federation; made anew"
    )
    parser.add_argument("--epsilon", type=float, default=1.0, help="the budget (default 1)")
    parser.add_argument("--rounds", type=int, default=8, help="default 8")
    parser.add_argument(
        "--trust", choices=("server", "secure_aggregation"), default="server", help="default server"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=demo)


def demo(arguments: argparse.Namespace) -> None:
    """Carry out `coterie deploy demo`."""
    from coterie.commands.deploy import need_flower

    need_flower()
    from coterie.deployment.demo import Demo, run_demo
    from coterie.report.page import write_report

    if not 0 < arguments.epsilon < math.inf:
        raise ValueError(f"--epsilon {arguments.epsilon}: expected a number above 0")
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds}: expected at least 1")
    out, started = Path(arguments.out), time.monotonic()
    _make_room(out)

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {text}", file=sys.stderr, flush=True)

    told = run_demo(
        Demo(
            folder=out,
            epsilon=arguments.epsilon,
            rounds=arguments.rounds,
            trust=arguments.trust,
        ),
        say,
    )
    page = out / "run" / "report.html"
    write_report([out / "run"], page)
    if arguments.json:
        print(json.dumps(told, indent=2, allow_nan=False))
        return
    for line in _words(told):
        print(line)
    print(f"report: {page}")
    print(f"check:  coterie verify {out / 'run'}")


def _make_room(out: Path) -> None:
    """Take an earlier demo away; never anything else."""
    from coterie.deployment.demo import MARK

    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MARK).exists()):
        raise FileExistsError(f"{out} is there, and is not an earlier demo: choose another --out")
    shutil.rmtree(out)


def _words(told: dict[str, object]) -> list[str]:
    from coterie.privacy.guarantee import round_up

    deployment = told["deployment"]
    assert isinstance(deployment, dict)
    lines = [f"epsilon at delta = {told['delta']:.3g}, by who looks:"]
    for row in deployment["sees"]:
        epsilon = float(row["epsilon"])
        lines.append(f"  {round_up(epsilon):>6}  {row['who']}: {row['sees']}")
    sites = told["sites"]
    assert isinstance(sites, dict)
    scores = ", ".join(f"{site} {kept['value']:.3f}" for site, kept in sites.items())
    metric = next(iter(sites.values()))["metric"] if sites else ""
    lines.append(f"each site's own {metric} (stays there; read here since all are ours): {scores}")
    return lines
