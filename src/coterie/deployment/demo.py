"""A federation in miniature: real data, real processes, one machine.

The school districts of Michigan (`coterie.data.datasets`) are dealt to four sites, a file of rows
each, as if they were four authorities. SuperLink and SuperNodes run as processes of their own over
TLS, with keys; the run's folder and the sites' folders are left behind, the processes are not.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.config import to_table, to_toml
from coterie.data.config import DataConfig
from coterie.data.datasets import DISTRICTS_TEST_ROWS
from coterie.data.federated import FederatedDataset
from coterie.deployment.layout import App, begin_app
from coterie.deployment.processes import FederationError, LocalFederation
from coterie.deployment.status import read_lines
from coterie.engines.federation import Trust
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.plan import Privacy
from coterie.privacy.sampling import Everyone
from coterie.run_plan import RunPlan

SITES = ("north", "south", "east", "west")
MARK = ".coterie-demo"
"""Marks a folder as a demo's, which another demo may take away."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What is shown.

    Attributes:
        folder: Where all of it goes: data, app, run and sites.
        epsilon: The budget, for the other clients.
        rounds: How many; a round over Flower takes seconds.
        trust: "server" or "secure_aggregation".
        seed: Makes noise known, and the run comparable with a simulation; None protects.
        limit: Seconds after which it is given up.
    """

    folder: Path
    epsilon: float = 1.0
    rounds: int = 8
    trust: Trust = "server"
    seed: int | None = None
    limit: float = 600.0


def run_demo(demo: Demo, say: Say) -> dict[str, Any]:
    """Run it; give the summary of the run, with the sites' own scores beside it."""
    # Other processes work in other folders: a relative path would be another place there.
    demo = replace(demo, folder=demo.folder.resolve())
    data = DataConfig(name="districts").open()
    app = write_demo(demo, data)
    run, started = demo.folder / "run", time.monotonic()
    say(f"{len(SITES)} sites, {len(data)} clients, PMTL, {demo.rounds} rounds, {demo.trust}")
    nodes = {site: site_config(demo.folder, app, site) for site in SITES}
    assert app.keys is not None
    with LocalFederation(demo.folder / "flower", app.keys, nodes) as federation:
        say(f"SuperLink and {len(SITES)} SuperNodes are up, {_since(started)}")
        number = federation.submit(
            app.folder, {"folder": str(run), "key": str(app.keys / "coordinator.key")}
        )
        status = _follow(federation, number, run, demo, say)
    say(f"everything is stopped again, {_since(started)}")
    if status != "finished:completed" or not (run / "result.json").exists():
        raise FederationError(
            f"the run ended as {status!r}{_why(run)}; see {run / 'log.jsonl'}, and logs in "
            f"{demo.folder / 'flower'}"
        )
    summary: dict[str, Any] = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {**summary, "sites": site_scores(demo.folder)}


def write_demo(demo: Demo, data: FederatedDataset) -> App:
    """Deal the clients to sites, write their rows, the plan and the app."""
    demo.folder.mkdir(parents=True, exist_ok=True)
    (demo.folder / MARK).touch()
    sites = {
        site: [data.names[i] for i in part]
        for site, part in zip(SITES, np.array_split(np.arange(len(data)), len(SITES)), strict=True)
    }
    first = 0
    for site, names in sites.items():
        write_rows(demo.folder / f"{site}.parquet", data, first, first + len(names))
        first += len(names)
    plan = demo.folder / "plan.toml"
    plan.write_text(to_toml(to_table(plan_of(demo))), encoding="utf-8")
    facts = {
        "task": data.spec.task,
        "shape": data.spec.shape,
        "outputs": data.spec.outputs,
        "trust": demo.trust,
        "simulation": demo.seed is not None,
    }
    return begin_app(demo.folder / "app", plan, sites, facts)


def plan_of(demo: Demo) -> RunPlan:
    """Return the plan; the same one can be simulated."""
    return RunPlan(
        data=DataConfig(name="districts", test=DISTRICTS_TEST_ROWS),
        method=PMTL(model=Linear()),
        privacy=Privacy(epsilon=demo.epsilon),
        sampler=Everyone(),
        rounds=demo.rounds,
        simulation_seed=demo.seed,
    )


def write_rows(path: Path, data: FederatedDataset, first: int, last: int) -> None:
    """Write the rows of some clients as a table, as a site would have them."""
    span = slice(int(data.offsets[first]), int(data.offsets[last]))
    names = np.repeat(np.array(data.names[first:last]), data.counts[first:last])
    rows = np.asarray(data.features[span])
    columns = {"client": pa.array(names), "y": pa.array(data.targets[span].numpy())}
    columns |= {f"x{i}": pa.array(rows[:, i]) for i in range(rows.shape[1])}
    pq.write_table(pa.table(columns), path)


def site_config(folder: Path, app: App, site: str) -> Mapping[str, str | bool]:
    """Return what a site's SuperNode is started with."""
    assert app.keys is not None
    return {
        "simulation": app.agreement.plan.simulation_seed is not None,
        "site": site,
        "key": str(app.keys / "sites" / site / "signing.key"),
        "folder": str(folder / "sites" / site),
        "data": str(folder / f"{site}.parquet"),
    }


def site_scores(folder: Path) -> dict[str, Any]:
    """Read what each site keeps of its own clients' scores; only who owns all sites can."""
    found = {}
    for path in sorted((folder / "sites").glob("*/*/site.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        found[told["site"]] = {"metric": told["metric"], "value": told["value"]}
    return found


def _follow(federation: LocalFederation, number: int, run: Path, demo: Demo, say: Say) -> str:
    """Wait for a run, and say what happens."""
    told, end = 0, time.monotonic() + demo.limit
    while True:
        status = federation.run_status(number)
        lines = list(read_lines(run / "log.jsonl"))
        for line in lines[told:]:
            if line["event"] == "round":
                say(f"round {line['round']} of {demo.rounds}: {line['answered']} clients answered")
            elif line["event"] in _TOLD:
                say(_TOLD[line["event"]](line))
        told = len(lines)
        if status.startswith("finished"):
            return status
        if time.monotonic() > end:
            raise FederationError(f"the run did not end within {demo.limit:g} s: it is {status}")
        time.sleep(0.5)


_TOLD: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "gathered": lambda line: f"{len(line['sites'])} of {len(SITES)} sites are there",
    "set_up": lambda line: f"keys of {line['sites']} sites for {line['sessions']} sums are shared",
    "short": lambda line: "too few sites answered: they are asked again",
    "void": lambda line: f"a round is void: {line['why']}",
    "failed": lambda line: f"failed: {line.get('why', line.get('kind', ''))}",
}


def _why(run: Path) -> str:
    """Quote what the log says of a failure, if it does."""
    failed = [line for line in read_lines(run / "log.jsonl") if line["event"] == "failed"]
    return f" ({failed[-1].get('why') or failed[-1].get('kind')})" if failed else ""


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"
