"""`coterie deploy`: run a plan on Flower: keys, an app, the SuperLink, its status, a demo."""

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import Commands, command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coterie.deploy.init import App

_MORE = """\
For a trial: init (which also makes keys), superlink, then the commands in the app's README.md."""
_CERTIFICATES = """\
Prints the public keys as federation.toml needs them. For development: the party that makes all keys
could act for every other. In production every site makes its own."""
_INIT = """\
The plan is the plan.toml of any run folder (`coterie run --out DIR`), or one written by hand; it is
copied unchanged. Sites come from a federation.toml, or from --sites, --task and --features; keys
are then made inside the app's folder unless --keys gives them. A plan that cannot run, or whose
guarantee cannot be computed, is refused here.

--json prints one object: folder, app, keys (or null), sites, clients, agreement, method, rounds,
trust, epsilon_by_view, delta, simulation, verdict (or null), notices."""
_SUPERLINK = """\
All arguments after -- are those of flower-superlink. Telemetry and update checks are off. Paths
other than /v1/fleet/ and /health return 403 to every address except this machine's own, because
Flower's Control API has no authentication and shares the port."""
_SUPERNODE = """\
All arguments after -- are those of flower-supernode. Telemetry and update checks are off, and the
process that Flower starts for every message starts in half the time.

--policy is for apps that are not made by coterie: clip, noise_multiplier, rounds, epsilon, delta
and folder, in TOML. Every update is clipped and gets noise at the site, every answer is charged
first, nothing else is sent, and the site refuses beyond rounds or epsilon. The app needs no change.
`coterie verify FOLDER` checks the site's account."""
_STATUS = """\
For a coordinator's run folder: its state (running, stopped, failed, finished), rounds, answers,
sites, epsilon spent and planned by adversary, and the next step. For a site's folder: the runs that
it joined, their progress and models, and what its clients have spent in all of them. It only reads,
also while the run continues. Who answered a round is private: protect the output like the folder.

--json prints one object. Coordinator: kind, folder, run, state, trust, started, last_event, rounds,
charged, released, ledger, epsilon (spent, planned, delta, relation, simulation), by_round, sites,
unknown_nodes, node_errors, delivered, failure, next, private. Site: kind, folder, site, runs,
errors, worker, spent."""
_WAIT = """\
`flwr run` ends with 0 when the run was submitted, and `flwr run --stream` also when it failed.
This command ends with

  0    the run is finished: its certificate is written
  1    it failed or was interrupted; stderr has the reason and the next step
  124  it had not ended within --limit seconds

The folder may not exist yet. An end before this command began counts after a minute in which
nothing happened, because the run may have been submitted again."""
_DEMO = """\
Four sites with a file of rows each (school districts of Michigan), a SuperLink and four SuperNodes
over TLS with keys, PMTL, epsilon by adversary, a report. All processes end. The folder has the app,
the run (`coterie verify`, `coterie report`) and the folders of the sites.

--json prints the run's result.json, with the scores of the sites."""
_HOSTS: dict[str, Any] = {
    "nargs": "+",
    "metavar": "NAME",
    "default": ["localhost", "127.0.0.1"],
    "help": "names and addresses of the SuperLink (default localhost 127.0.0.1)",
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "task": {
        "choices": ("regression", "binary", "multiclass", "multilabel"),
        "help": "type of the target",
    },
    "features": {"metavar": "N[,N]", "help": "the shape of a row"},
    "classes": {"type": int, "metavar": "N", "help": "number of classes or labels"},
    "trust": {
        "choices": ("server", "secure_aggregation", "nobody"),
        "help": "what the coordinator observes: sums of sites (default server), only the sum over "
        "sites, or only sums with noise that clients add in shares",
    },
    "deadline": {
        "type": float,
        "metavar": "SECONDS",
        "help": "seconds to wait for the answers of a round",
    },
    "minimum": {
        "type": float,
        "metavar": "SHARE",
        "help": "smallest share of clients that must answer",
    },
    "simulation": {
        "action": "store_true",
        "help": "permit a plan with a seed; protects nobody",
    },
}
"""Options of `init` that go with --sites."""
_INTERVAL = 2.0
_SHOWN = 12
_TIMED_OUT = 124  # as of timeout(1)
VIEWS = {
    "other_clients": "the other clients, all together",
    "coordinator": "the coordinator",
    "coordinator_and_corrupt": "the coordinator, with the corrupt clients",
    "outsider": "an outsider who observes only releases",
    "coalition_of_all_others": "a coalition of all others",
}
_COLUMNS = {
    "asked": "clients asked",
    "answered": "clients answered",
    "rejected": "answers rejected",
    "failed": "sites failed",
    "silent": "sites silent",
    "scaled": "sums scaled",
    "zeroed": "sums zeroed",
}
_COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow"}


def add(commands: Commands) -> None:
    """Add `deploy`."""
    parser = command(
        commands,
        "deploy",
        "run a plan on Flower: keys, a ready app, a SuperLink with access control",
        "coterie deploy init app --plan plan.toml --sites north=a,b south=c --task regression "
        "--features 20",
        _MORE,
    )
    inner = parser.add_subparsers(dest="deploy_command", required=True, metavar="COMMAND")
    for add_one in (
        _add_certificates,
        _add_init,
        _add_superlink,
        _add_supernode,
        _add_status,
        _add_wait,
        _add_demo,
    ):
        add_one(inner)


def _add_certificates(inner: Commands) -> None:
    parser = command(
        inner,
        "certificates",
        "make keys and certificates for a trial",
        "coterie deploy certificates keys --sites north south --host link.example",
        _CERTIFICATES,
    )
    parser.add_argument("folder", metavar="DIR", help="folder to write; never overwritten")
    parser.add_argument(
        "--sites", nargs="+", metavar="NAME", required=True, help="names of the sites"
    )
    parser.add_argument("--host", **_HOSTS)
    parser.add_argument("--days", type=int, default=30, help="validity in days (default 30)")
    parser.set_defaults(action=certificates)


def _add_init(inner: Commands) -> None:
    parser = command(
        inner,
        "init",
        "write a ready Flower app, and print its guarantee",
        "coterie deploy init app --plan runs/exam/plan.toml --federation federation.toml",
        _INIT,
    )
    parser.add_argument("folder", metavar="DIR", help="folder to write; absent or empty")
    parser.add_argument("--plan", metavar="FILE", required=True, help="a plan.toml")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--federation", metavar="FILE", help="a federation.toml")
    who.add_argument(
        "--sites",
        metavar="NAME=CLIENT,CLIENT",
        nargs="+",
        help="sites and their clients; NAME=@FILE reads one client per line",
    )
    parser.add_argument(
        "--keys", metavar="DIR", help="folder made by `coterie deploy certificates`"
    )
    parser.add_argument("--host", **_HOSTS)
    settings = parser.add_argument_group("with --sites")
    for name, options in _SETTINGS.items():
        settings.add_argument(f"--{name}", **options)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=init)


def _add_superlink(inner: Commands) -> None:
    parser = command(
        inner,
        "superlink",
        "start Flower's SuperLink with access control: other machines can use only the API of "
        "SuperNodes",
        "coterie deploy superlink --control-from 10.0.0.7 -- --host 0.0.0.0 --port 9100 "
        "--ssl-certfile keys/server.pem --ssl-keyfile keys/server.key --ssl-ca-certfile "
        "keys/ca.pem --enable-supernode-auth --disable-runtime-dependency-installation",
        _SUPERLINK,
    )
    parser.add_argument(
        "--control-from",
        metavar="ADDRESS",
        nargs="+",
        action="extend",
        default=[],
        help="more addresses that may submit runs",
    )
    parser.add_argument(
        "others", metavar="-- ARGUMENT", nargs="*", help="arguments of flower-superlink"
    )
    parser.set_defaults(action=superlink)


def _add_supernode(inner: Commands) -> None:
    parser = command(
        inner,
        "supernode",
        "start a site's SuperNode, under a policy of its own for any app",
        "coterie deploy supernode --policy policy.toml -- --superlink link.example:9100 "
        "--root-certificates ca.pem --auth-supernode-private-key supernode",
        _SUPERNODE,
    )
    parser.add_argument(
        "--policy", metavar="FILE", help="what the site permits any app; not for apps of coterie"
    )
    parser.add_argument(
        "others", metavar="-- ARGUMENT", nargs="*", help="arguments of flower-supernode"
    )
    parser.set_defaults(action=supernode)


def _add_status(inner: Commands) -> None:
    parser = command(
        inner,
        "status",
        "show rounds, answers and epsilon of a deployment, at the coordinator or at a site",
        "coterie deploy status runs/hospitals",
        _STATUS,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="folder of a coordinator's run, or of a site"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="repeat until the run has ended")
    parser.add_argument(
        "--serve",
        metavar="PORT",
        type=int,
        nargs="?",
        const=0,
        help="a live page on 127.0.0.1, also /status.json, /health and /ready (default: a free "
        "port)",
    )
    parser.set_defaults(action=status)


def _add_wait(inner: Commands) -> None:
    parser = command(
        inner,
        "wait",
        "wait until a run has ended; the exit status is its outcome",
        "coterie deploy wait runs/ward --limit 3600",
        _WAIT,
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder of the coordinator's run")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="wait no longer (default: no limit)"
    )
    parser.set_defaults(action=wait)


def _add_demo(inner: Commands) -> None:
    parser = command(
        inner,
        "demo",
        "run a federation on this machine: SuperLink, four SuperNodes, TLS, keys, a report",
        "coterie deploy demo --trust nobody",
        _DEMO,
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="runs/federation",
        help="folder, replaced (default runs/federation)",
    )
    parser.add_argument("--epsilon", type=float, default=1.0, help="the budget (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default 5)")
    parser.add_argument("--trust", **{**_SETTINGS["trust"], "default": "server"})
    parser.add_argument(
        "--limit",
        type=float,
        default=1200.0,
        metavar="SECONDS",
        help="fail after so many seconds, and say why (default 1200)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=demo)


def need_flower() -> None:
    """Raise `ValueError` if packages of the extra are missing."""
    from importlib.util import find_spec

    needed = ("flwr", "cryptography", "psutil")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ValueError(f"deploy needs {' and '.join(missing)}: pip install 'coterie[flower]'")


def certificates(arguments: argparse.Namespace) -> None:
    """Run `coterie deploy certificates`."""
    need_flower()
    from coterie.deploy.keys import make_certificates

    folder = Path(arguments.folder)
    public = make_certificates(folder, arguments.sites, arguments.host, arguments.days)
    print(public.lines(), end="")
    print(
        f"keys for development are in {folder}: give each site {folder / 'sites'}/NAME, and "
        "nothing else",
        file=sys.stderr,
    )


def init(arguments: argparse.Namespace) -> None:
    """Run `coterie deploy init`."""
    need_flower()
    from coterie.deploy.init import init_app, write_app

    folder, plan = Path(arguments.folder), Path(arguments.plan)
    keys = None if arguments.keys is None else Path(arguments.keys)
    if arguments.federation is not None:
        _refuse_settings(arguments)
        app = write_app(folder, plan, Path(arguments.federation), keys)
    else:
        sites = _sites(arguments.sites)
        app = init_app(folder, plan, sites, _settings(arguments), keys, arguments.host)
    if arguments.json:
        print(json.dumps(_app_facts(app), indent=2, allow_nan=False))
    else:
        print("\n".join(_app_lines(app)))


def superlink(arguments: argparse.Namespace) -> int:
    """Run `coterie deploy superlink`."""
    need_flower()
    from coterie.deploy.superlink import main

    allowed = ["--control-from", *arguments.control_from] if arguments.control_from else []
    return main([*allowed, *arguments.others])


def supernode(arguments: argparse.Namespace) -> None:
    """Run `coterie deploy supernode`: this process becomes Flower's."""
    need_flower()
    from coterie.deploy.starter import POLICY, light_path, program
    from coterie.deploy.superlink import SWITCHES
    from coterie.deploy.worker import socket_path

    program("flower-supernode")  # raises where Flower is not installed
    environment = {**os.environ, **SWITCHES}
    if arguments.policy is not None:
        from coterie.flower.policy import Policy

        path = Path(arguments.policy).resolve()
        Policy.load(path)
        environment[POLICY] = str(path)
    beside = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["PATH"] = light_path(socket_path(Path("starter")).parent / "bin", beside)
    os.execvpe("flower-supernode", ["flower-supernode", *arguments.others], environment)  # noqa: S606, S607


def status(arguments: argparse.Namespace) -> int:
    """Run `coterie deploy status`."""
    need_flower()
    from rich.console import Console

    from coterie.deploy.status import status_of

    folder = Path(arguments.folder)
    if arguments.json + arguments.watch + (arguments.serve is not None) > 1:
        raise ValueError("--watch, --json and --serve exclude each other: give one of them")
    if arguments.serve is not None:
        return _serve(folder, arguments.serve)
    found = status_of(folder)
    if arguments.json:
        print(json.dumps(found, allow_nan=False))
    elif arguments.watch:
        _watch(folder, found)
    else:
        Console().print(rendered(found))
    return 0


def wait(arguments: argparse.Namespace) -> int:
    """Run `coterie deploy wait`."""
    need_flower()
    from coterie.deploy.status import status_of, wait_for

    folder = Path(arguments.folder)
    limit = math.inf if arguments.limit is None else arguments.limit
    if not limit > 0:
        raise ValueError(f"--limit {limit}: expected seconds above 0")
    state = wait_for(folder, limit)
    if state == "finished":
        print(f"finished: coterie verify {folder}")
        return 0
    if state == "running":
        print(f"{folder}: not ended after {limit:g} s", file=sys.stderr)
        return _TIMED_OUT
    print(f"{state}: {status_of(folder)['next']}", file=sys.stderr)
    return 1


def demo(arguments: argparse.Namespace) -> None:
    """Run `coterie deploy demo`."""
    need_flower()
    from coterie.deploy.demo import Demo, run_demo
    from coterie.report.page import write_report

    if not 0 < arguments.epsilon < math.inf:
        raise ValueError(f"--epsilon {arguments.epsilon}: expected a number above 0")
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds}: expected at least 1")
    if not arguments.limit > 0:
        raise ValueError(f"--limit {arguments.limit}: expected seconds above 0")
    out, started = Path(arguments.out), time.monotonic()
    _remove_demo(out)

    def report(text: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {text}", file=sys.stderr, flush=True)

    settings = {name: getattr(arguments, name) for name in ("epsilon", "rounds", "limit")}
    summary = run_demo(Demo(folder=out, trust=arguments.trust, **settings), report)
    page = out / "run" / "report.html"
    write_report([out / "run"], page)
    if arguments.json:
        print(json.dumps(summary, indent=2, allow_nan=False))
        return
    ends = (f"report: {page}", f"check:  coterie verify {out / 'run'}")
    print("\n".join([*_demo_lines(summary), *ends]))


def _sites(given: Sequence[str]) -> dict[str, list[str]]:
    """Return clients by site, from NAME=CLIENT,CLIENT or NAME=@FILE."""
    found: dict[str, list[str]] = {}
    for text in given:
        name, equals, listed = text.partition("=")
        if not equals or not name or not listed:
            raise ValueError(f"--sites {text}: expected NAME=CLIENT,CLIENT or NAME=@FILE")
        if name in found:
            raise ValueError(f"--sites: {name} is given twice; list all its clients at once")
        lines = _listed(text, listed[1:]) if listed.startswith("@") else listed.split(",")
        found[name] = [line.strip() for line in lines if line.strip()]
    return found


def _listed(text: str, path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ValueError(
            f"--sites {text}: {path} cannot be read ({why}); give a file with one client per line"
        ) from error


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a federation other than its sites."""
    task = arguments.task
    if task is None or arguments.features is None:
        raise ValueError(
            "--sites needs --task and --features too, such as --task regression --features 20"
        )
    several = task in ("multiclass", "multilabel")
    if several == (arguments.classes is None):
        raise ValueError(f"--task {task} {'needs' if several else 'takes no'} --classes")
    try:
        shape = tuple(int(part) for part in arguments.features.split(","))
    except ValueError:
        raise ValueError(f"--features {arguments.features}: expected 20, or 28,28") from None
    names = ("trust", "deadline", "minimum")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return {
        "task": task,
        "shape": shape,
        "outputs": arguments.classes or 1,
        "simulation": arguments.simulation,
        **given,
    }


def _refuse_settings(arguments: argparse.Namespace) -> None:
    given = [name for name in _SETTINGS if getattr(arguments, name) not in (None, False)]
    if given:
        raise ValueError(f"--{given[0]} goes with --sites: set it in federation.toml instead")


def _app_facts(app: "App") -> dict[str, Any]:
    from coterie.evaluation.metrics import json_number

    agreement, federation = app.agreement, app.agreement.federation
    return {
        "folder": str(app.folder),
        "app": app.name,
        "keys": None if app.keys is None else str(app.keys),
        "sites": len(federation.sites),
        "clients": len(federation.clients),
        "agreement": agreement.digest,
        "method": agreement.plan.method.kind,
        "rounds": agreement.plan.posts,
        "trust": federation.trust,
        "epsilon_by_view": {view: json_number(value) for view, value in app.views.items()},
        "delta": agreement.plan.delta(len(federation.clients)),
        "simulation": agreement.plan.simulation_seed is not None,
        "verdict": None if app.advice is None else app.advice.to_json(),
        "notices": list(app.notices),
    }


def _app_lines(app: "App") -> Iterator[str]:
    facts = _app_facts(app)
    yield (
        f"{facts['app']}: {facts['method']}, {facts['rounds']} rounds, {facts['clients']} clients "
        f"at {facts['sites']} sites; trust: {facts['trust']}"
    )
    yield f"epsilon at delta = {_delta(facts['delta'])}, by adversary:"
    width = max(len(VIEWS.get(view, view)) for view in app.views)
    for view, value in app.views.items():
        yield f"  {VIEWS.get(view, view):<{width}}  {_bound(value)}"
    if app.advice is not None:
        yield str(app.advice)
    if facts["simulation"]:
        yield "a simulation: its noise comes from a seed, and protects nobody"
    if app.keys is not None:
        yield f"keys for development only: {app.keys}; their owner can act for every party"
    yield from app.notices
    yield f"agreement, for sites that pin it: {facts['agreement']}"
    yield f"next: {app.folder / 'README.md'}"


def _remove_demo(out: Path) -> None:
    """Remove an earlier demo, and never anything else."""
    from coterie.deploy.demo import MARK

    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MARK).exists()):
        raise FileExistsError(f"{out} exists, and is not an earlier demo: choose another --out")
    shutil.rmtree(out)


def _demo_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    yield f"epsilon at delta = {_delta(summary['delta'])}, by adversary:"
    for row in summary["deployment"]["sees"]:
        yield f"  {_bound(row['epsilon']):>6}  {row['who']}: {row['sees']}"
    sites = summary["sites"]
    scores = ", ".join(f"{site} {one['value']:.3f}" for site, one in sites.items())
    metric = next(iter(sites.values()))["metric"] if sites else ""
    yield f"{metric} at each site (shown because all sites are on this machine): {scores}"


def _serve(folder: Path, port: int) -> int:
    """Serve the live page until Ctrl-C."""
    from coterie.deploy.live import HOST, make_server

    if not 0 <= port < 65536:
        raise ValueError(f"--serve {port}: expected a port from 1 to 65535")
    with make_server(folder, rendered, port) as server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        print(f"{address} (private to this machine; Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("the page ended; the run continues", file=sys.stderr)
    return 0


def _watch(folder: Path, found: dict[str, Any]) -> None:
    """Show a run until it has ended; a site until Ctrl-C."""
    from rich.live import Live

    from coterie.deploy.status import status_of

    with Live(rendered(found), auto_refresh=False) as live:
        try:
            while found.get("state", "running") == "running":
                time.sleep(_INTERVAL)
                found = status_of(folder)
                live.update(rendered(found), refresh=True)
        except KeyboardInterrupt:
            print("the display ended; the run continues", file=sys.stderr)


def rendered(found: Mapping[str, Any]) -> "RenderableType":
    """Return a status for a terminal."""
    from rich.console import Group

    return Group(*(_site_lines(found) if found["kind"] == "site" else _run_lines(found)))


def _run_lines(found: Mapping[str, Any]) -> Iterator["RenderableType"]:
    from rich.text import Text

    state = found["state"]
    yield Text.assemble(
        (state, f"bold {_COLOURS[state]}"),
        f": {found['released']} of {found['rounds']} rounds released, {found['charged']} charged; "
        f"trust {found['trust']}",
    )
    if found["ledger"] != "sound":
        yield Text(f"the ledger is {found['ledger']}", style="bold red")
    yield _epsilon_table(found["epsilon"])
    if found["by_round"]:
        yield _round_table(found["by_round"])
    yield _site_table(found["sites"])
    if found["unknown_nodes"]:
        yield Text(f"{found['unknown_nodes']} answers of nodes that are not in the federation")
    if found["node_errors"]:
        yield Text(
            f"nodes failed {found['node_errors']} times before they were identified as sites: see "
            "worker.log at the sites that are not connected"
        )
    yield Text(f"next: {found['next']}")
    yield Text(f"private: {found['private']}", style="dim")


def _table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]
) -> "RenderableType":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        narrow = name in ("run", "counted")
        table.add_column(name, justify="left" if name in left else "right", no_wrap=narrow)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _epsilon_table(found: Mapping[str, Any]) -> "RenderableType":
    mark = "  SIMULATION: known seed, protects nobody" if found["simulation"] else ""
    title = f"epsilon at delta {_delta(found['delta'])}, {found['relation']}{mark}"
    rows = [
        (VIEWS.get(view, view), _bound(found["spent"].get(view)), _bound(planned))
        for view, planned in found["planned"].items()
    ]
    return _table(title, ("against", "spent so far", "planned"), rows, ("against",))


def _bound(epsilon: float | str | None) -> str:
    from coterie.privacy.guarantee import round_up

    return "-" if epsilon is None else round_up(float(epsilon))


def _delta(delta: float) -> str:
    from coterie.privacy.guarantee import show_delta

    return show_delta(delta)


def _round_table(rounds: list[dict[str, Any]]) -> "RenderableType":
    """Return a table of the last rounds; columns of trouble only where there was some."""
    trouble = ("rejected", "failed", "silent", "scaled", "zeroed", "void", "repeated")
    counts = ("asked", "answered", *(n for n in trouble if any(one.get(n) for one in rounds)))
    title = "rounds" if len(rounds) <= _SHOWN else f"the last {_SHOWN} of {len(rounds)} rounds"
    rows = [
        (
            f"{one['round']}{'' if one['released'] else ' (not released)'}",
            *(str(one.get(name) or 0) for name in counts),
        )
        for one in rounds[-_SHOWN:]
    ]
    return _table(title, ("round", *(_COLUMNS.get(name, name) for name in counts)), rows, ())


def _site_table(sites: Mapping[str, Mapping[str, Any]]) -> "RenderableType":
    rows = []
    for name, one in sites.items():
        kinds = ("rejected", "declined", "clipped", "errors", "other_versions")
        counts = ", ".join(f"{one[kind]} {kind.replace('_', ' ')}" for kind in kinds if one[kind])
        last, connected = one["last_trouble"], one["connected"]
        rows.append(
            (
                name,
                str(one["clients"]),
                "never" if connected is None else connected[:19].replace("T", " "),
                "none" if one["counted"] is None else str(one["counted"]),
                f"{counts}: {last['reason']}" if last else counts,
            )
        )
    columns = ("site", "clients", "connected", "last counted round", "trouble")
    return _table("sites", columns, rows, [name for name in columns if name != "clients"])


def _site_lines(found: Mapping[str, Any]) -> Iterator["RenderableType"]:
    from rich.text import Text

    runs = found["runs"]
    named = f"site {found['site']}" if found["site"] else "site"
    joined = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    yield Text(f"{named}: {joined} joined; {found['errors']} lines in errors.log")
    if found["worker"]:
        yield Text(f"last line of worker.log: {found['worker']}")
    if runs:
        yield _joined_table(runs)
    yield Text(_spent_line(found["spent"]))


def _joined_table(runs: list[dict[str, Any]]) -> "RenderableType":
    rows = [
        (
            one["run"],
            (one["joined"] or "-").replace("T", " "),
            f"{one['counted']} of {'?' if one['rounds'] is None else one['rounds']}",
            "-" if one["staged"] is None else str(one["staged"]),
            str(one["models"]) if one["finished"] else "not yet",
            _bound(one["epsilon"]) + (" SIMULATION" if one["simulation"] else ""),
            "-" if one["delta"] is None else _delta(one["delta"]),
        )
        for one in runs
    ]
    columns = ("run", "joined", "counted", "staged", "models", "epsilon", "delta")
    return _table(None, columns, rows, ("run", "joined"))


def _spent_line(spent: Mapping[str, Any]) -> str:
    line = f"spent of its clients: epsilon {_bound(spent['epsilon'])}, "
    line += f"delta {_delta(spent['delta'])} ({spent['note']})"
    if spent["simulations"]:
        line += (
            f"; not included: {spent['simulations']} with noise from a known seed, which protects "
            "nobody and has no bound on private rows"
        )
    if spent["unknown"]:
        line += f"; {spent['unknown']} runs without a stored guarantee"
    return line
