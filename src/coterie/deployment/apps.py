"""The two Flower apps of a deployment: what `flwr run` starts at the coordinator and at the sites.

An app folder holds plan.toml, federation.toml and the data hook; `coterie deploy init` writes it.
Heavy imports wait until they are needed: a ClientApp is a new process for every message.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.flower import GridTransport, make_client_app, make_server_app
from coterie.wire import Parcel, pack, unpack

if TYPE_CHECKING:
    from coterie.engines.site import Site


def client_app(app: Path) -> ClientApp:
    """Make the ClientApp of an app folder."""

    def answer(parcel: Parcel, context: Context) -> Parcel:
        from coterie.deployment.worker import relay

        config = dict(context.node_config)
        for name in ("site", "key", "folder"):
            if name not in config:
                raise ValueError(
                    f"the SuperNode was started without {name}: give --node-config "
                    '\'site="..." key="..." folder="..."\''
                )
        return unpack(relay(pack(parcel), app, config))

    return make_client_app(answer)


def server_app(app: Path) -> ServerApp:
    """Make the ServerApp of an app folder."""

    def conduct(grid: Grid, context: Context) -> None:
        from coterie.deployment.agreement import load_agreement
        from coterie.deployment.conduct import conduct_run

        folder = Path(str(context.run_config["folder"])).expanduser()
        key = Path(str(context.run_config["key"])).expanduser()

        def say(line: str) -> None:
            print(f"coterie: {line}", flush=True)  # what `flwr run --stream` shows

        told = conduct_run(
            load_agreement(app), folder, key, lambda note: GridTransport(grid, note), say
        )
        say(f"done: {told['run']}; coterie verify {told['run']}")

    return make_server_app(conduct)


def open_site(
    app: Path, config: Mapping[str, Any], say: Callable[[str], None] = lambda _: None
) -> "Site":
    """Open a site: agreement, key and rows; `say` takes hints on the rows, for the site alone."""
    from coterie.deployment.agreement import load_agreement
    from coterie.deployment.certificates import load_private
    from coterie.deployment.keeping import keep_models
    from coterie.deployment.rows import hints_on, load_rows
    from coterie.engines.site import Site, SiteSetting

    agreement, name = load_agreement(app), str(config["site"])
    pinned = str(config.get("agreement", agreement.digest))
    if pinned != agreement.digest:
        raise ValueError(
            f"the app holds agreement {agreement.digest}, and this site permits {pinned} alone "
            "(agreement=... in --node-config): look at plan.toml and federation.toml of the app"
        )
    if agreement.plan.simulation_seed is not None and config.get("simulation") is not True:
        raise ValueError(
            "the plan has a seed: its noise is known and protects nobody; a site takes part in a "
            "rehearsal only if it was started with simulation=true in --node-config"
        )
    train, test, moments = load_rows(agreement, name, app, config)
    hints = hints_on(agreement, name, train)
    for hint in hints:
        say(hint)
    return Site(
        SiteSetting(
            name=name,
            plan=agreement.plan,
            federation=agreement.federation,
            agreement=agreement.digest,
            rows=train,
            folder=Path(str(config["folder"])).resolve(),
            key=load_private(Path(str(config["key"]))),
            runs=int(config.get("runs", 1)),
            finished=keep_models(agreement, name, train, test, moments, hints),
        )
    )
