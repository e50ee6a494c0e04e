"""A Flower app for a federation: what `coterie deploy init` checks and writes.

    pyproject.toml   read by Flower; `folder` and `key` are the coordinator's (run config)
    plan.toml        the plan, byte for byte as given
    federation.toml  sites, clients, public keys, trust
    rows.py          the data hook; a site's owner fills in a copy, or names a file by `data`
    NAME_app/        the two apps that Flower starts
    README.md        the commands, in order
    keys/            development keys, where none were given; never distributed

`flwr run` packs all but the keys and sends it to every site. Nothing else in the folder is sent
(`fab-include`), so rows that are put there by mistake stay there.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie.core.config import ConfigError, to_toml
from coterie.data.datasets import NAMES
from coterie.deploy.federation import (
    FEDERATION,
    PLAN,
    Agreement,
    Federation,
    SiteEntry,
    check_deployable,
    colluding_sites,
    epsilon_by_view,
    load_federation,
    make_agreement,
)
from coterie.deploy.keys import HOSTS, PublicKeys, make_certificates, new_folder, read_public
from coterie.planning.advice import Advice
from coterie.planning.plan import Plan
from coterie.planning.rules import advice_for

VERSION = "1.0.0"
_KEYS = "keys"
_PORT = 9100
_ROWS = '''\
"""This site's rows: fill in a copy of this file, and name it by hook="/path/rows.py"."""

from coterie.deploy.rows import read_rows


def rows(config):
    """Return this site's rows: {client name: (X, y)}."""
    return read_rows(config)  # reads config["data"] as the plan's [data.source] describes
'''
_APP = '''\
"""The {side}'s side of the federation."""

from pathlib import Path

from coterie.deploy.flower import {side}_app

app = {side}_app(Path(__file__).resolve().parent.parent)
'''
_README = """\
# {name}

A federation of {sites} sites and {clients} clients; trust: {trust}. plan.toml and federation.toml
are public, and the same at every site. Rows and personal models stay at the sites.

On every machine: `pip install 'coterie[flower]'`, and

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

## Keys

{about_keys}

LINK below is the name of the coordinator's machine as sites reach it. The SuperLink's certificate
must be valid for LINK and for 127.0.0.1.

## The coordinator

Start the SuperLink in this folder. Other machines can reach only Fleet; runs are submitted from
this machine (`--control-from ADDRESS` permits another one).

    coterie deploy superlink -- --host 0.0.0.0 --port {port} \\
      --ssl-certfile {keys}/server.pem --ssl-keyfile {keys}/server.key \\
      --ssl-ca-certfile {keys}/ca.pem \\
      --enable-supernode-auth --disable-runtime-dependency-installation

Add its address to ~/.flwr/config.toml:

    [superlink]
    default = "{name}"

    [superlink.{name}]
    address = "127.0.0.1:{port}"
    root-certificates = "{ca}"

Register every site's SuperNode:

{register}

## Each site

Rows come from the file that `data` names, read as [data.source] of plan.toml describes. For other
sources fill in a copy of rows.py, and name it: `hook="/path/rows.py"`. `folder` has the personal
models of the site's clients: it must be durable, and belongs to the site only. Several SuperNodes
on one machine need a `--port` each (default 9094). The SuperLink readmits a SuperNode that was
killed after a minute without contact: restart it until then (a service with `Restart=always`).

{supernodes}

## Run

    flwr run . {name} --stream
    coterie deploy status runs/{name}
    coterie verify runs/{name}
    coterie report runs/{name}

`folder` (the coordinator's run folder) and `key` (its private key) are in pyproject.toml, relative
to the folder in which the SuperLink was started. To change them: `--run-config 'folder="/path"
key="/path"'`. An interrupted run resumes from its ledger when it is submitted again with the same
folder.
"""
_REGISTER = "    flwr supernode register {keys}/sites/{site}/supernode.pub {name} --name {site}"
_SUPERNODE = """\
    flower-supernode --superlink LINK:{port} --root-certificates ca.pem \\
      --auth-supernode-private-key supernode \\
      --node-config 'site="{site}" key="/path/signing.key" folder="/path/{site}" \
data="/path/rows.csv"'"""
_TRIAL_KEYS = """\
The party that makes all keys could act for every other: this is for trials. Give each site its
folder `{keys}/sites/NAME`, and nothing else of `{keys}`. In production every site makes its own
keys, and sends the public ones."""
_MADE_KEYS = """\
`{keys}` has the keys: `coterie deploy init` made them, and a certificate for
{hosts}. For another name make the app again, with `--host LINK 127.0.0.1`.

"""
_GIVEN_KEYS = """\
`{keys}` has the keys, as `coterie deploy certificates` made them.

"""
_OWN_KEYS = """\
federation.toml lists the public keys. Each party keeps its own private key, and shows it to nobody.
The coordinator needs

- `{keys}/coordinator.key`: its signing key, which pyproject.toml names;
- `{keys}/server.pem`, `{keys}/server.key`, `{keys}/ca.pem`: the SuperLink's certificate from your
  certificate authority, and the authority's own;
- `{keys}/sites/NAME/supernode.pub`: the public key of each site's SuperNode."""


@dataclass(frozen=True)
class App:
    """An app that was written; `keys` is the folder of development keys, where init made them."""

    folder: Path
    agreement: Agreement
    keys: Path | None = None

    @property
    def name(self) -> str:
        """Its name in Flower."""
        return name_of(self.folder)

    @property
    def package(self) -> str:
        """The package of the two apps."""
        return package_of(self.name)

    @cached_property
    def views(self) -> Mapping[str, float]:
        """Epsilon by adversary."""
        return epsilon_by_view(self.agreement.guarantee, self.agreement.federation)

    @cached_property
    def advice(self) -> Advice | None:
        """Whether federated learning helps under this plan, as `advice_for` returns it."""
        return advice_for(self.agreement.plan, self.agreement.spec)

    @property
    def notices(self) -> list[str]:
        """Problems that would be met later."""
        return [*self._of_collusion(), *self._of_classes()]

    def _of_collusion(self) -> list[str]:
        """Return a notice if no site may collude, although the guarantee permits some clients."""
        agreement, federation = self.agreement, self.agreement.federation
        if federation.trust != "nobody":
            return []
        if sites := colluding_sites(agreement.guarantee, federation):
            return [f"the epsilons hold if at most {sites} of the other sites collude"]
        largest = max(len(site.clients) for site in federation.sites.values())
        return [
            "the epsilons hold only if no other site colludes: for one that may, set corrupt = "
            f"{largest} or more in [privacy.noise] of the plan (the largest site has so many "
            "clients)"
        ]

    def _of_classes(self) -> list[str]:
        """Return a notice if the default hook would have to infer classes."""
        data, spec = self.agreement.plan.data, self.agreement.federation.spec
        source = data.source
        guessed = source.task is None and spec.task == "binary" and not source.positives
        declared = data.name in NAMES or source.class_count is not None
        if declared or not (guessed or spec.task == "multiclass"):
            return []
        classes = 2 if spec.task == "binary" else spec.outputs
        return [
            f"sites do not infer classes from their rows: declare classes = {classes} in "
            "[data.source] of the plan, unless all sites fill in rows.py"
        ]


def write_app(folder: Path, plan: Path, federation: Path, keys: Path | None = None) -> App:
    """Write an app for a plan.toml and a federation.toml.

    `keys` is the folder of keys, if the coordinator's is here: pyproject.toml names it.
    """
    _check_free(folder)
    known = load_federation(federation)
    agreement = _checked(plan, known)
    if keys is not None and read_public(keys).coordinator != known.coordinator:
        raise ConfigError(
            f"{keys}: the coordinator's key differs from federation.toml; give the folder of its "
            "keys"
        )
    with new_folder(folder) as made:
        _write_files(made, folder, plan, agreement.federation, federation.read_bytes(), keys)
    return App(folder, agreement)


def init_app(
    folder: Path,
    plan: Path,
    sites: Mapping[str, Sequence[str]],
    settings: Mapping[str, Any],
    keys: Path | None = None,
    hosts: Sequence[str] = HOSTS,
) -> App:
    """Write an app for a federation that has no file yet; make development keys unless given.

    `sites` are clients by site, `settings` the other fields of a `Federation`, `keys` a folder that
    `make_certificates` wrote, and `hosts` names of the SuperLink, for keys that are made.
    """
    _check_free(folder)
    # Check the plan before keys are made; placeholders are enough for that.
    blank = PublicKeys("0" * 64, {name: f"{at:064x}" for at, name in enumerate(sites, 1)})
    public = blank if keys is None else read_public(keys)
    agreement = _checked(plan, make_federation(sites, public, settings))
    with new_folder(folder) as made:
        if keys is None:
            public = make_certificates(made / _KEYS, list(sites), hosts)
            federation = make_federation(sites, public, settings)
            agreement = replace(agreement, federation=federation)
        federation = agreement.federation
        named = None if keys is not None else hosts
        place = keys or folder / _KEYS
        _write_files(made, folder, plan, federation, federation.to_toml().encode(), place, named)
    return App(folder, agreement, keys=place if keys is None else None)


def make_federation(
    sites: Mapping[str, Sequence[str]], public: PublicKeys, settings: Mapping[str, Any]
) -> Federation:
    """Return a federation of sites, clients and public keys."""
    missing = [name for name in sites if name not in public.sites]
    if missing:
        raise ValueError(
            f"no public key of site {missing[0]!r}: there are keys of "
            f"{', '.join(public.sites) or 'no site'}; make keys for the same sites"
        )
    entries = {
        name: SiteEntry(clients=tuple(clients), key=public.sites[name])
        for name, clients in sites.items()
    }
    return Federation(sites=entries, coordinator=public.coordinator, **settings)


def _checked(plan: Path, federation: Federation) -> Agreement:
    """Return the agreement of a plan that can be deployed, and whose epsilon can be computed."""
    agreement = make_agreement(Plan.load(plan), federation)
    check_deployable(agreement.plan, federation)
    epsilon_by_view(agreement.guarantee, federation)
    return agreement


def name_of(folder: Path) -> str:
    """Return an app's name, of letters, digits and hyphens as Flower requires.

    >>> name_of(Path("runs/Ward 7 (north)")), name_of(Path("7"))
    ('Ward-7-north', 'federation-7')
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-")
    named = plain if plain[:1].isalpha() else f"federation-{plain}"
    return named[:32].strip("-")


def package_of(name: str) -> str:
    """Return the package of an app; its suffix avoids the names of other modules."""
    return f"{name.replace('-', '_').lower()}_app"


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists: choose another folder")


def _write_files(
    made: Path,
    folder: Path,
    plan: Path,
    federation: Federation,
    text: bytes,
    keys: Path | None,
    hosts: Sequence[str] | None = None,
) -> None:
    """Write all files but keys; `hosts` are given where the keys were made with the app."""
    name = name_of(folder)
    package = package_of(name)
    # By default keys are expected in the app's own folder.
    place = _KEYS if keys is None else os.path.relpath(keys.resolve(), folder.resolve())
    about_keys = _OWN_KEYS if keys is None else _GIVEN_KEYS + _TRIAL_KEYS
    if hosts is not None:
        about_keys = _MADE_KEYS + _TRIAL_KEYS
    about_keys = about_keys.format(keys=place, hosts=" and ".join(hosts or ()))
    (made / package).mkdir()
    (made / PLAN).write_bytes(plan.read_bytes())
    (made / FEDERATION).write_bytes(text)
    texts = {
        "pyproject.toml": to_toml(_project(name, package, f"{place}/coordinator.key")),
        "rows.py": _ROWS,
        ".gitignore": f"{_KEYS}/\nruns/\n",
        "README.md": _readme(name, federation, place, about_keys),
        f"{package}/__init__.py": f'"""The apps of {name}."""\n',
        f"{package}/server.py": _APP.format(side="server"),
        f"{package}/client.py": _APP.format(side="client"),
    }
    for path, content in texts.items():
        (made / path).write_text(content, encoding="utf-8")


def _project(name: str, package: str, key: str) -> dict[str, Any]:
    included = [f"{package}/*.py", "rows.py", PLAN, FEDERATION, "README.md"]
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": VERSION,
            "description": "A federation of coterie",
            "license": "Apache-2.0",
            "dependencies": ["coterie[flower]"],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "coterie",
                    "fab-include": included,
                    "components": {
                        "serverapp": f"{package}.server:app",
                        "clientapp": f"{package}.client:app",
                    },
                    "config": {"folder": f"runs/{name}", "key": key},
                }
            },
        },
    }


def _readme(name: str, federation: Federation, keys: str, about_keys: str) -> str:
    sites = list(federation.sites)
    return _README.format(
        name=name,
        sites=len(sites),
        clients=len(federation.clients),
        trust=federation.trust,
        about_keys=about_keys,
        port=_PORT,
        keys=keys,
        ca=f"{keys}/ca.pem" if keys.startswith("/") else f"/path/to/this/folder/{keys}/ca.pem",
        register="\n".join(_REGISTER.format(keys=keys, name=name, site=site) for site in sites),
        supernodes="\n\n".join(_SUPERNODE.format(site=site, port=_PORT) for site in sites),
    )
