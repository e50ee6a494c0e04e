"""`coterie deploy`: a plan on Flower, over a network: keys, an app, the SuperLink."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.commands.deploy_demo import add_demo
from coterie.commands.deploy_status import VIEWS, add_status
from coterie.commands.options import Commands, _command

if TYPE_CHECKING:
    from coterie.deployment.layout import App

_MORE = """\
A trial, in order: init (it makes keys too), superlink, then what README.md in the app says."""
_CERTIFICATES = """\
Prints the public keys as federation.toml needs them. For development: whoever makes all keys could
act as everybody; in earnest every site makes its own."""
_INIT = """\
The plan is the plan.toml of any run folder (`coterie run --out DIR`), or one written by hand; it is
copied as it is. Sites come from a federation.toml, or from --sites, --task and --features; keys are
then made inside the app's folder unless --keys names them. What cannot be run, or cannot be
accounted for, is refused here.

--json prints one object: folder, app, keys (or null), sites, clients, agreement, method, rounds,
trust, epsilon_by_view, delta, simulation, verdict (or null),
notices."""
_SUPERLINK = """\
All arguments after -- are those of flower-superlink. Telemetry and update checks are off. Paths
other than /v1/fleet/ and /health answer 403 to every address but this machine's own, since
Flower's Control has no authentication and shares the port."""


def add(commands: Commands) -> None:
    """Add `deploy`."""
    parser = _command(
        commands,
        "deploy",
        "run a plan on Flower: keys, a ready app, a guarded SuperLink",
        "coterie deploy init app --plan plan.toml --sites north=a,b south=c --task regression "
        "--features 20",
        _MORE,
    )
    inner = parser.add_subparsers(dest="deploy_command", required=True, metavar="COMMAND")
    _add_certificates(inner)
    _add_init(inner)
    _add_superlink(inner)
    add_status(inner)
    add_demo(inner)


def _add_certificates(inner: Commands) -> None:
    parser = _command(
        inner,
        "certificates",
        "make keys and certificates for a trial",
        "coterie deploy certificates keys --sites north south --host link.example",
        _CERTIFICATES,
    )
    parser.add_argument("folder", metavar="DIR", help="where to; never overwritten")
    parser.add_argument("--sites", nargs="+", metavar="NAME", required=True, help="their names")
    _add_hosts(parser)
    parser.add_argument("--days", type=int, default=30, help="how long they hold (default 30)")
    parser.set_defaults(action=certificates)


def _add_init(inner: Commands) -> None:
    parser = _command(
        inner,
        "init",
        "write a ready Flower app, and say what it would guarantee",
        "coterie deploy init app --plan runs/exam/plan.toml --federation federation.toml",
        _INIT,
    )
    parser.add_argument("folder", metavar="DIR", help="where to; must not exist, or be empty")
    parser.add_argument("--plan", metavar="FILE", required=True, help="a plan.toml")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--federation", metavar="FILE", help="a federation.toml")
    who.add_argument(
        "--sites",
        metavar="NAME=CLIENT,CLIENT",
        nargs="+",
        help="sites and their clients; NAME=@FILE reads one client a line",
    )
    parser.add_argument("--keys", metavar="DIR", help="made by `coterie deploy certificates`")
    _add_hosts(parser)
    facts = parser.add_argument_group("with --sites")
    facts.add_argument("--task", choices=("regression", "binary", "multiclass", "multilabel"))
    facts.add_argument("--features", metavar="N[,N]", help="the shape of a row")
    facts.add_argument("--classes", type=int, metavar="N", help="classes, or labels")
    facts.add_argument("--trust", choices=("server", "secure_aggregation"), help="default server")
    facts.add_argument("--deadline", type=float, metavar="SECONDS", help="of a round's answers")
    facts.add_argument("--minimum", type=float, metavar="SHARE", help="of clients that answer")
    facts.add_argument(
        "--simulation", action="store_true", help="permit a plan with a seed; protects nobody"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=init)


def _add_superlink(inner: Commands) -> None:
    parser = _command(
        inner,
        "superlink",
        "start Flower's SuperLink, closed to strangers but for SuperNodes",
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
        help="addresses besides this machine's own that may submit runs",
    )
    parser.add_argument("others", metavar="-- ARGUMENT", nargs="*", help="of flower-superlink")
    parser.set_defaults(action=superlink)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        nargs="+",
        metavar="NAME",
        default=["localhost", "127.0.0.1"],
        help="names and addresses of the SuperLink (default localhost 127.0.0.1)",
    )


def certificates(arguments: argparse.Namespace) -> None:
    """Carry out `coterie deploy certificates`."""
    need_flower()
    from coterie.deployment.certificates import make_certificates

    folder = Path(arguments.folder)
    public = make_certificates(folder, arguments.sites, arguments.host, arguments.days)
    print(public.lines(), end="")
    print(
        f"keys for development in {folder}: give each site {folder / 'sites'}/NAME, and nothing "
        "else of it",
        file=sys.stderr,
    )


def init(arguments: argparse.Namespace) -> None:
    """Carry out `coterie deploy init`."""
    need_flower()
    from coterie.deployment.layout import begin_app, write_app

    folder, plan = Path(arguments.folder), Path(arguments.plan)
    keys = None if arguments.keys is None else Path(arguments.keys)
    if arguments.federation is not None:
        _refuse_facts(arguments)
        app = write_app(folder, plan, Path(arguments.federation), keys)
    else:
        sites = _sites(arguments.sites)
        app = begin_app(folder, plan, sites, _facts(arguments), keys, arguments.host)
    if arguments.json:
        print(json.dumps(_told(app), indent=2, allow_nan=False))
    else:
        print(_words(app))


def superlink(arguments: argparse.Namespace) -> int:
    """Carry out `coterie deploy superlink`."""
    need_flower()
    from coterie.deployment.superlink import main

    allowed = ["--control-from", *arguments.control_from] if arguments.control_from else []
    return main([*allowed, *arguments.others])


def need_flower() -> None:
    """Refuse to go on without the packages of the extra."""
    from importlib.util import find_spec

    missing = [name for name in ("flwr", "cryptography") if find_spec(name) is None]
    if missing:
        raise ValueError(f"deploy needs {' and '.join(missing)}: pip install 'coterie[flower]'")


def _sites(given: Sequence[str]) -> dict[str, list[str]]:
    """Read sites and their clients: NAME=CLIENT,CLIENT or NAME=@FILE."""
    found: dict[str, list[str]] = {}
    for word in given:
        name, equals, listed = word.partition("=")
        if not equals or not name or not listed:
            raise ValueError(f"--sites {word}: expected NAME=CLIENT,CLIENT or NAME=@FILE")
        if name in found:
            raise ValueError(f"--sites: {name} is given twice; list all its clients at once")
        lines = _listed(word, listed[1:]) if listed.startswith("@") else listed.split(",")
        found[name] = [line.strip() for line in lines if line.strip()]
    return found


def _listed(word: str, path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(
            f"--sites {word}: {path} cannot be read ({why}); give a file with one client a line"
        ) from error


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gather what a federation is besides its sites."""
    task = arguments.task
    if task is None or arguments.features is None:
        raise ValueError(
            "--sites needs --task and --features too: what a row is, such as --task regression "
            "--features 20"
        )
    several = task in ("multiclass", "multilabel")
    if several == (arguments.classes is None):
        raise ValueError(f"--task {task} {'needs' if several else 'takes no'} --classes")
    try:
        shape = tuple(int(part) for part in arguments.features.split(","))
    except ValueError:
        raise ValueError(f"--features {arguments.features}: expected 20, or 28,28") from None
    named = ("trust", "deadline", "minimum")
    said = {name: value for name in named if (value := getattr(arguments, name)) is not None}
    return {
        "task": task,
        "shape": shape,
        "outputs": arguments.classes or 1,
        "simulation": arguments.simulation,
        **said,
    }


def _refuse_facts(arguments: argparse.Namespace) -> None:
    named = ("task", "features", "classes", "trust", "deadline", "minimum", "simulation")
    said = [name for name in named if getattr(arguments, name) not in (None, False)]
    if said:
        raise ValueError(f"--{said[0]} goes with --sites: federation.toml says it already")


def _told(app: "App") -> dict[str, Any]:
    from coterie.evaluation.metrics import json_number
    from coterie.run_plan import advice_of

    agreement, federation = app.agreement, app.agreement.federation
    advice = advice_of(agreement.run_plan, federation.spec)
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
        "verdict": None if advice is None else advice.to_json(),
        "notices": list(app.notices),
    }


def _words(app: "App") -> str:
    from coterie.privacy.words import round_up

    told = _told(app)
    lines = [
        f"{told['app']}: {told['method']}, {told['rounds']} rounds, {told['clients']} clients at "
        f"{told['sites']} sites; trust: {told['trust']}",
        f"epsilon at delta = {told['delta']:.3g}, by who looks:",
    ]
    width = max(len(VIEWS.get(view, view)) for view in app.views)
    lines += [
        f"  {VIEWS.get(view, view):<{width}}  {round_up(value)}"
        for view, value in app.views.items()
    ]
    if told["verdict"] is not None:
        lines.append(f"{told['verdict']['verdict']}: {told['verdict']['words']}")
    if told["simulation"]:
        lines.append("a simulation: its noise comes from a seed, and protects nobody")
    if app.keys is not None:
        lines.append(
            f"keys for development only: {app.keys}; whoever has them can act as everybody"
        )
    lines += app.notices
    lines.append(f"agreement, for sites that pin it: {told['agreement']}")
    lines.append(f"next: {app.folder / 'README.md'}")
    return "\n".join(lines)
