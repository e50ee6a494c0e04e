"""A Flower app for a federation: what `coterie deploy init` writes, checked before it is written.

    pyproject.toml   what Flower reads; folder and key are the coordinator's (run config)
    plan.toml        the plan, byte for byte as given
    federation.toml  sites, clients, public keys, trust
    rows.py          the data hook; a site's owner fills a copy, or names a file by `data`
    NAME_app/        the two apps that Flower starts
    README.md        the commands, in order
    keys/            development keys, where none were given; never part of what travels

`flwr run` packs all but the keys and brings it to every site. Nothing else in the folder travels
(`fab-include`), so that rows put there by mistake stay there.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.config import ConfigError, to_table, to_toml
from coterie.data.datasets import NAMES
from coterie.data.federated import DataError, FederatedDataset
from coterie.deployment.agreement import (
    FEDERATION,
    PLAN,
    Agreement,
    agree,
    load_agreement,
    load_federation,
)
from coterie.deployment.certificates import HOSTS, PublicKeys, make_certificates, read_public
from coterie.deployment.onlookers import by_view
from coterie.deployment.readme import readme
from coterie.engines.federation import Federation, SiteEntry
from coterie.methods.base import Shape
from coterie.privacy.files import sync_folder
from coterie.run_plan import load_plan

VERSION = "1.0.0"
_KEYS = "keys"
_SHOWN = 12
_ROWS = '''\
"""This site's rows: fill a copy of this file, and name it by hook="/path/rows.py"."""

from coterie.deployment.layout import read_rows


def rows(config):
    """Return this site's rows: {client name: (X, y)}."""
    return read_rows(config)  # reads config["data"] as the plan's [data.source] says
'''
_APP = '''\
"""The {side}'s side of the federation."""

from pathlib import Path

from coterie.deployment.apps import {side}_app

app = {side}_app(Path(__file__).resolve().parent.parent)
'''


@dataclass(frozen=True)
class App:
    """An app that was written.

    Attributes:
        folder: Where.
        name: What Flower calls it.
        agreement: Plan and federation, resolved.
        views: Epsilon by who looks.
        keys: The folder of development keys, where init made them.
    """

    folder: Path
    name: str
    agreement: Agreement
    views: Mapping[str, float]
    keys: Path | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        """What a site would stumble over later."""
        return tuple(_undeclared(self.agreement))

    @property
    def package(self) -> str:
        """The package of the two apps."""
        return package_of(self.name)


def write_app(
    folder: Path,
    plan: Path,
    federation: Path | Federation,
    keys: Path | None = None,
) -> App:
    """Write an app for keys that exist.

    Args:
        folder: Where to; must not exist, or be empty.
        plan: A plan.toml: of any run folder, or written by hand.
        federation: A federation.toml, or its content.
        keys: The folder of keys, if the coordinator's is here: named in pyproject.toml.

    Raises:
        FileExistsError: If the folder holds something.
        ConfigError: If plan and federation do not fit.
    """
    _check_free(folder)
    text = _federation_text(federation)
    known = load_federation(federation) if isinstance(federation, Path) else federation
    agreement = agree(load_plan(plan), known)
    views = check_agreement(agreement)
    if keys is not None:
        _check_keys(keys, known)
    with _aside(folder) as made:
        _write_files(made, folder, plan.read_bytes(), text, keys)
        made.rename(folder)
    sync_folder(folder.parent)
    return App(folder, name_of(folder), agreement, views)


def begin_app(
    folder: Path,
    plan: Path,
    sites: Mapping[str, Sequence[str]],
    facts: Mapping[str, Any],
    keys: Path | None = None,
    hosts: Sequence[str] = HOSTS,
) -> App:
    """Write an app for a federation that has no file yet; make development keys unless given.

    Args:
        folder: Where to; must not exist, or be empty.
        plan: A plan.toml.
        sites: Clients by site.
        facts: The other fields of a `Federation`: task, shape, outputs, trust, ...
        keys: A folder that `make_certificates` wrote; None makes one inside the app's folder.
        hosts: Names under which the SuperLink is reached, for keys that are made.
    """
    _check_free(folder)
    if keys is not None:
        return write_app(folder, plan, make_federation(sites, read_public(keys), facts), keys)
    # What is wrong with the plan is to be said before keys are made: any keys will do to see it.
    blank = PublicKeys("0" * 64, {name: f"{at:064x}" for at, name in enumerate(sites, 1)})
    check_agreement(agree(load_plan(plan), make_federation(sites, blank, facts)))
    with _aside(folder) as made:
        public = make_certificates(made / _KEYS, list(sites), hosts)
        federation = make_federation(sites, public, facts)
        text = _federation_text(federation)
        _write_files(made, folder, plan.read_bytes(), text, folder / _KEYS, hosts)
        made.rename(folder)
    sync_folder(folder.parent)
    agreement = load_agreement(folder)
    return App(folder, name_of(folder), agreement, epsilon_by_view(agreement), keys=folder / _KEYS)


def make_federation(
    sites: Mapping[str, Sequence[str]], public: PublicKeys, facts: Mapping[str, Any]
) -> Federation:
    """Put sites, clients and public keys together."""
    missing = [name for name in sites if name not in public.sites]
    if missing:
        raise ValueError(
            f"no public key of site {missing[0]!r}: there are keys of "
            f"{', '.join(public.sites) or 'nobody'}; make keys for the same sites"
        )
    entries = {
        name: SiteEntry(clients=tuple(clients), key=public.sites[name])
        for name, clients in sites.items()
    }
    return Federation(sites=entries, coordinator=public.coordinator, **facts)


def check_agreement(agreement: Agreement) -> dict[str, float]:
    """Refuse a plan that cannot travel; give epsilon by who looks.

    Raises:
        ConfigError: If rows would have to be brought together, or the noise is known beforehand.
    """
    plan, federation = agreement.plan, agreement.federation
    if plan.method.shape is Shape.POOLED:
        raise ConfigError(
            f"method {plan.method.kind} brings all rows together, and in a federation they stay at "
            "their sites: choose another, such as pmtl"
        )
    if plan.simulation_seed is not None and not federation.simulation:
        raise ConfigError(
            f"simulation_seed = {plan.simulation_seed}: noise from a seed is known to whoever "
            "reads the plan, and protects nobody; leave it out, or say simulation = true in "
            "federation.toml if all rows are public"
        )
    return epsilon_by_view(agreement)


def _undeclared(agreement: Agreement) -> Iterator[str]:
    """Say that classes are not declared: the usual hook refuses to read them off a site's rows."""
    data, spec = agreement.run_plan.data, agreement.federation.spec
    source = data.source
    guessed = source.task is None and spec.task == "binary" and not source.positives
    if data.name in NAMES or source.class_count is not None:
        return
    if guessed or spec.task == "multiclass":
        classes = 2 if spec.task == "binary" else spec.outputs
        yield (
            f"sites will refuse to read classes off their rows: declare classes = {classes} in "
            "[data.source] of the plan, unless all of them fill rows.py"
        )


def epsilon_by_view(agreement: Agreement) -> dict[str, float]:
    """Return epsilon by who looks, under the federation's trust."""
    federation = agreement.federation
    return by_view(agreement.plan.guarantee(len(federation.clients)), federation)


def read_rows(config: Mapping[str, Any]) -> FederatedDataset:
    """Read a site's rows from `config["data"]`, as the plan's [data.source] says.

    Args:
        config: What the site was started with (site, data), and `app`, the app's folder.

    Raises:
        DataError: If rows are not as the federation has agreed, or some client has none.
    """
    agreement = load_agreement(Path(config["app"]))
    federation, site = agreement.federation, str(config["site"])
    given = config.get("data")
    if given is None:
        raise DataError(
            f'site {site} was started without data: add data="/path/to/rows.csv" to the '
            'SuperNode\'s --node-config, or fill rows.py and name it there: hook="/path/rows.py"'
        )
    data = replace(agreement.run_plan.data, name=str(given), clients=None).open()
    _check_like(data, federation, str(given))
    places = {name: place for place, name in enumerate(data.names)}
    missing = [name for name in federation.sites[site].clients if name not in places]
    if missing:
        raise DataError(
            f"{given}: no rows of client {missing[0]!r} of site {site}; it has "
            f"{', '.join(data.names[:5])}{', ...' if len(data.names) > 5 else ''}"
        )
    return data.only([places[name] for name in federation.sites[site].clients])


def name_of(folder: Path) -> str:
    """Return an app's name, of letters, digits and hyphens as Flower wants it.

    >>> name_of(Path("runs/Ward 7 (north)")), name_of(Path("7"))
    ('Ward-7-north', 'federation-7')
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-")
    named = plain if plain[:1].isalpha() else f"federation-{plain}"
    return named[:32].strip("-")


def package_of(name: str) -> str:
    """Return the package of an app; no name of it can hide another module's."""
    return f"{name.replace('-', '_').lower()}_app"


def _check_like(data: FederatedDataset, federation: Federation, given: str) -> None:
    spec, wanted = data.spec, federation.spec
    found = (spec.shape, spec.outputs, spec.task)
    if found != (wanted.shape, wanted.outputs, wanted.task):
        raise DataError(
            f"{given}: rows of shape {spec.shape}, {spec.outputs} outputs, {spec.task}; the "
            f"federation has agreed on {wanted.shape}, {wanted.outputs}, {wanted.task}"
            f"{_columns(data)}"
        )
    if data.assumed and given not in NAMES:
        # Read off one site's rows, the same word could be another class than elsewhere.
        raise DataError(
            f"{given}: {data.assumed[0]}; sites could read it off differently: declare it in the "
            "plan's [data.source]"
        )


def _columns(data: FederatedDataset) -> str:
    """Say which columns were read as features, and what the reader says of others."""
    read = f"; columns read: {', '.join(list(data.columns)[:_SHOWN])}" if data.columns else ""
    more = ", ..." if len(data.columns) > _SHOWN else ""
    left_out = [note for note in data.notes if "left out" in note]
    return read + more + "".join(f"; {note}" for note in left_out)


def _federation_text(federation: Path | Federation) -> bytes:
    if isinstance(federation, Path):
        load_federation(federation)
        return federation.read_bytes()
    return to_toml(to_table(federation)).encode()


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already: choose another folder")


def _check_keys(keys: Path, federation: Federation) -> None:
    public = read_public(keys)
    if public.coordinator != federation.coordinator:
        raise ConfigError(
            f"{keys}: the coordinator's key is another than federation.toml has; give the folder "
            "of its keys"
        )


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """Return a folder beside the one that is meant, so that an app is whole or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as kept:
        made = Path(kept, "made")
        made.mkdir()
        yield made


def _write_files(
    made: Path,
    folder: Path,
    plan: bytes,
    federation: bytes,
    keys: Path | None,
    hosts: Sequence[str] | None = None,
) -> None:
    name = name_of(folder)
    package = package_of(name)
    # Where nothing else was said, keys are expected in the app's own folder.
    place = _KEYS if keys is None else os.path.relpath(keys.resolve(), folder.resolve())
    (made / package).mkdir()
    (made / PLAN).write_bytes(plan)
    (made / FEDERATION).write_bytes(federation)
    agreement = load_agreement(made)
    texts = {
        "pyproject.toml": to_toml(_project(name, package, f"{place}/coordinator.key")),
        "rows.py": _ROWS,
        ".gitignore": f"{_KEYS}/\nruns/\n",
        "README.md": readme(name, agreement.federation, place, hosts, given=keys is not None),
        f"{package}/__init__.py": f'"""The apps of {name}."""\n',
        f"{package}/server.py": _APP.format(side="server"),
        f"{package}/client.py": _APP.format(side="client"),
    }
    for path, text in texts.items():
        (made / path).write_text(text, encoding="utf-8")


def _project(name: str, package: str, key: str) -> dict[str, Any]:
    travels = [f"{package}/*.py", "rows.py", PLAN, FEDERATION, "README.md"]
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
                    "fab-include": travels,
                    "components": {
                        "serverapp": f"{package}.server:app",
                        "clientapp": f"{package}.client:app",
                    },
                    "config": {"folder": f"runs/{name}", "key": key},
                }
            },
        },
    }
