"""A small federation: real data, real processes, one machine.

The school districts of Michigan (`coterie.data.datasets`) are split over four sites, with a file of
rows each, as if they were four authorities. SuperLink and SuperNodes run as processes of their own
over TLS, with keys. The run's folder and the sites' folders remain; the processes end.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.core.config import to_table, to_toml
from coterie.data.config import DataConfig
from coterie.data.datasets import DISTRICTS_TEST_ROWS
from coterie.data.federated import FederatedDataset
from coterie.deploy.federation import Trust
from coterie.deploy.init import App, init_app
from coterie.deploy.processes import FederationError, LocalFederation
from coterie.deploy.status import read_events
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.noise import GaussianNoise, Noise, SharedNoise
from coterie.privacy.sampling import Everyone

SITES = ("north", "south", "east", "west")
MARK = ".coterie-demo"
"""Marks the folder of a demo, which another demo may remove."""
Report = Callable[[str], None]
_SILENCE, _POLL = 60.0, 30.0
_ENDS = ("delivered", "failed", "interrupted")
_UNCLAIMED = "token authentication failed"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The settings of a demo in a folder; a seed makes the noise known, None protects.

    A round over Flower takes seconds; the demo fails after `limit` seconds, of which processes may
    take half to start.
    """

    folder: Path
    epsilon: float = 1.0
    rounds: int = 5
    trust: Trust = "server"
    seed: int | None = None
    limit: float = 1200.0


def run_demo(demo: Demo, report: Report) -> dict[str, Any]:
    """Run a demo; return the summary of the run, with the scores of the sites."""
    # Other processes have other working directories, so paths must be absolute.
    demo = replace(demo, folder=demo.folder.resolve())
    data = DataConfig(name="districts").open()
    app = write_demo(demo, data)
    run, started = demo.folder / "run", time.monotonic()
    report(f"{len(SITES)} sites, {len(data)} clients, PMTL, {demo.rounds} rounds, {demo.trust}")
    nodes = {site: site_config(demo.folder, app, site) for site in SITES}
    assert app.keys is not None
    place, patience = demo.folder / "flower", demo.limit / 2
    with LocalFederation(place, app.keys, nodes, patience=patience) as federation:
        report(f"SuperLink and {len(SITES)} SuperNodes are up, {_since(started)}")
        number = federation.submit(
            app.folder, {"folder": str(run), "key": str(app.keys / "coordinator.key")}
        )
        status = _follow(federation, number, run, replace(demo, limit=_left(demo, started)), report)
    report(f"all processes have ended, {_since(started)}")
    if status != "finished:completed" or not (run / "result.json").exists():
        raise FederationError(
            f"the run ended as {status!r}{_failure(run)}; see {run / 'log.jsonl'}, and logs in "
            f"{demo.folder / 'flower'}"
        )
    summary: dict[str, Any] = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {**summary, "sites": site_scores(demo.folder)}


def write_demo(demo: Demo, data: FederatedDataset) -> App:
    """Split the clients over sites; write their rows, the plan and the app."""
    demo.folder.mkdir(parents=True, exist_ok=True)
    (demo.folder / MARK).touch()
    parts = np.array_split(np.arange(len(data)), len(SITES))
    sites = {}
    for site, part in zip(SITES, parts, strict=True):
        sites[site] = [data.names[i] for i in part]
        write_rows(demo.folder / f"{site}.parquet", data, int(part[0]), int(part[-1]) + 1)
    plan = demo.folder / "plan.toml"
    plan.write_text(to_toml(to_table(plan_of(demo, len(data)))), encoding="utf-8")
    settings = {
        "task": data.spec.task,
        "shape": data.spec.shape,
        "outputs": data.spec.outputs,
        "trust": demo.trust,
        "deadline": 300.0,  # all sites share one machine, which may be busy
        "simulation": demo.seed is not None,
    }
    return init_app(demo.folder / "app", plan, sites, settings)


def plan_of(demo: Demo, clients: int) -> Plan:
    """Return the plan; the same plan can be simulated.

    Under trust = "nobody" one of the sites may be absent, and one may collude.
    """
    noise: Noise = GaussianNoise()
    if demo.trust == "nobody":
        largest = -(-clients // len(SITES))
        noise = SharedNoise(minimum_clients=clients - largest, corrupt=largest)
    return Plan(
        data=DataConfig(name="districts", test=DISTRICTS_TEST_ROWS),
        method=PMTL(model=Linear()),
        privacy=Privacy(
            epsilon=demo.epsilon,
            noise=noise,
        ),
        sampler=Everyone(),
        rounds=demo.rounds,
        simulation_seed=demo.seed,
    )


def write_rows(path: Path, data: FederatedDataset, first: int, last: int) -> None:
    """Write the rows of some clients as a table for a site."""
    span = slice(int(data.offsets[first]), int(data.offsets[last]))
    names = np.repeat(np.array(data.names[first:last]), data.counts[first:last])
    rows = np.asarray(data.features[span])
    columns = {"client": pa.array(names), "y": pa.array(data.targets[span].numpy())}
    columns |= {f"x{i}": pa.array(rows[:, i]) for i in range(rows.shape[1])}
    pq.write_table(pa.table(columns), path)


def site_config(folder: Path, app: App, site: str) -> Mapping[str, str | bool]:
    """Return the `--node-config` of a site's SuperNode."""
    assert app.keys is not None
    return {
        "simulation": app.agreement.plan.simulation_seed is not None,
        "site": site,
        "key": str(app.keys / "sites" / site / "signing.key"),
        "folder": str(folder / "sites" / site),
        "data": str(folder / f"{site}.parquet"),
    }


def site_scores(folder: Path) -> dict[str, Any]:
    """Return the scores that each site stores; only an owner of all sites can read them."""
    found = {}
    for path in sorted((folder / "sites").glob("*/*/site.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        found[about["site"]] = {"metric": about["metric"], "value": about["value"]}
    return found


def _follow(federation: LocalFederation, number: int, run: Path, demo: Demo, report: Report) -> str:
    """Wait for a run and report its events; return its status."""
    seen, end, heard = 0, time.monotonic() + demo.limit, time.monotonic()
    status, ask = "pending", time.monotonic() + _POLL
    while not status.startswith("finished"):
        events = list(read_events(run / "log.jsonl"))
        if time.monotonic() > ask or any(one["event"] in _ENDS for one in events):
            # A request takes a second or two of a core, which the run could use.
            status, ask = federation.run_status(number), time.monotonic() + _POLL
        for event in (one for one in events[seen:] if one["event"] in _LINES):
            report(_LINES[event["event"]](event, demo))
        if len(events) > seen:
            seen, heard = len(events), time.monotonic()
        elif time.monotonic() - heard > _SILENCE:
            heard = time.monotonic()
            report(f"nothing for {_SILENCE:g} s: {cause(federation.folder)}")
        if time.monotonic() > end:
            raise FederationError(
                f"the run did not end within the limit and is {status}: {cause(federation.folder)}"
            )
        time.sleep(0.5)
    return status


def cause(folder: Path) -> str:
    """Return why a federation on this machine may be slow, from its logs and the system's load."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    logs = "".join(path.read_text(errors="replace") for path in folder.glob("logs/*.log"))
    refused = logs.count(_UNCLAIMED)
    found = [f"the load of this machine is {load:.1f} on {cores} cores"]
    if refused:
        found.append(
            f"{refused} requests came from apps that Flower had given up, because they did not "
            "begin within 30 s"
        )
    return (
        f"{', and '.join(found)}. Every message starts a process that needs about 3 s of a core: "
        f"end other work, or raise --limit. Logs are in {folder / 'logs'}"
    )


def _left(demo: Demo, started: float) -> float:
    return demo.limit - (time.monotonic() - started)


_LINES: Mapping[str, Callable[[Mapping[str, Any], Demo], str]] = {
    "handshake": lambda event, _: f"{len(event['sites'])} of {len(SITES)} sites are connected",
    "setup": lambda event, _: f"keys of {event['sites']} sites for {event['sessions']} sums",
    "round": lambda event, demo: (
        f"round {event['round']} of {demo.rounds}: {event['answered']} clients answered"
    ),
    "incomplete": lambda event, _: "too few sites answered: they are asked again",
    "void": lambda event, _: f"a round is void: {event['reason']}",
    "failed": lambda event, _: f"failed: {event.get('reason', event.get('kind', ''))}",
}


def _failure(run: Path) -> str:
    """Return the failure in the log, if there is one."""
    failed = [event for event in read_events(run / "log.jsonl") if event["event"] == "failed"]
    return f" ({failed[-1].get('reason') or failed[-1].get('kind')})" if failed else ""


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"
