"""The README of an app: the commands that start a federation, in order, for this app."""

from collections.abc import Sequence

from coterie.engines.federation import Federation

_PORT = 9100
_TEXT = """\
# {name}

A federation of {sites} sites and {clients} clients; trust: {trust}. Public, and the same at every
site: plan.toml and federation.toml. Rows and personal models stay at the sites.

Everywhere: `pip install 'coterie[flower]'`, and

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

## Keys

{made}

LINK below is the name under which sites reach the coordinator's machine; the SuperLink's
certificate has to name it, and 127.0.0.1.

## The coordinator

Start the SuperLink in this folder. Sites can reach Fleet and nothing else; runs are submitted
from this machine alone (`--control-from ADDRESS` lets another one in).

    coterie deploy superlink -- --host 0.0.0.0 --port {port} \\
      --ssl-certfile {keys}/server.pem --ssl-keyfile {keys}/server.key \\
      --ssl-ca-certfile {keys}/ca.pem \\
      --enable-supernode-auth --disable-runtime-dependency-installation

Say where it is, in ~/.flwr/config.toml:

    [superlink]
    default = "{name}"

    [superlink.{name}]
    address = "127.0.0.1:{port}"
    root-certificates = "{ca}"

Register every site's SuperNode:

{register}

## Each site

Rows come from the file that `data` names, read as [data.source] of plan.toml says; for anything
else fill a copy of rows.py, and name it: `hook="/path/rows.py"`. `folder` keeps the personal
models of the site's clients: durable, and the site's alone. Several SuperNodes on one machine need
a `--port` each (default 9094). A SuperNode that was killed is let in again when it has not been
heard of for a minute: have it started again until then (a service with `Restart=always`).

{supernodes}

## Run

    flwr run . {name} --stream
    coterie deploy status runs/{name}
    coterie verify runs/{name}
    coterie report runs/{name}

`folder` (the coordinator's run folder) and `key` (its private key) are in pyproject.toml, relative
to where the SuperLink was started; others: `--run-config 'folder="/path" key="/path"'`. A run that
was interrupted goes on from its ledger when it is submitted again with the same folder.
"""


_FOR_TRIAL = """\
Whoever makes all keys could act as everybody: that is for a trial. Give each site its folder
`{keys}/sites/NAME`, and nothing else of `{keys}`. In earnest every site makes its own keys, and
sends the public ones."""
_MADE = """\
`{keys}` holds the keys: `coterie deploy init` made them, and a certificate for
{hosts}. For another name make the app again, with `--host LINK 127.0.0.1`.

"""
_GIVEN = """\
`{keys}` holds the keys, as `coterie deploy certificates` made them.

"""
_OWN = """\
federation.toml lists the public keys. Each party puts its own private key in place, and shows it to
nobody. Yours are

- `{keys}/coordinator.key`: the coordinator's signing key, which pyproject.toml names;
- `{keys}/server.pem`, `{keys}/server.key`, `{keys}/ca.pem`: the SuperLink's certificate, from your
  authority, and the authority's;
- `{keys}/sites/NAME/supernode.pub`: what each site sent of its SuperNode's key."""


def readme(
    name: str, federation: Federation, keys: str, hosts: Sequence[str] | None, *, given: bool
) -> str:
    """Write the page.

    Args:
        name: The app's.
        federation: Who takes part.
        keys: The folder of keys, as seen from the app's.
        hosts: Names that the SuperLink's certificate is for, where it was made with the app.
        given: Whether all keys were given, made for a trial.
    """
    about = _MADE + _FOR_TRIAL if hosts is not None else _GIVEN + _FOR_TRIAL if given else _OWN
    sites = list(federation.sites)
    register = "\n".join(
        f"    flwr supernode register {keys}/sites/{site}/supernode.pub {name} --name {site}"
        for site in sites
    )
    return _TEXT.format(
        name=name,
        sites=len(sites),
        clients=len(federation.clients),
        trust=federation.trust,
        made=about.format(keys=keys, hosts=" and ".join(hosts or ())),
        port=_PORT,
        keys=keys,
        ca=f"{keys}/ca.pem" if keys.startswith("/") else f"/path/to/this/folder/{keys}/ca.pem",
        register=register,
        supernodes="\n\n".join(_supernode(site) for site in sites),
    )


def _supernode(site: str) -> str:
    return (
        f"    flower-supernode --superlink LINK:{_PORT} --root-certificates ca.pem \\\n"
        "      --auth-supernode-private-key supernode \\\n"
        f'      --node-config \'site="{site}" key="/path/signing.key" folder="/path/{site}" '
        'data="/path/rows.csv"\''
    )
