"""The app that `deploy init` writes: packed by Flower itself, and refused where it must be."""

import csv
import importlib.util
import io
import json
import re
import shlex
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.core.config import ConfigError, from_table, to_toml
from coterie.data.federated import DataError
from coterie.deploy.federation import Federation, load_agreement
from coterie.deploy.init import name_of, package_of
from coterie.deploy.keys import load_private, make_certificates
from coterie.deploy.messages import public_hex
from coterie.deploy.rows import load_rows, read_rows

pytestmark = pytest.mark.full
PLAN = """\
# written by hand
rounds = 4
[data]
name = "rows.csv"
test = 0.25
{source}
[method]
kind = "{method}"
[privacy]
{privacy}
"""
SITES = ["north=a,b", "south=c", "east=d,e"]
FACTS = ["--task", "regression", "--features", "3"]


def _plan(path: Path, method="pmtl", privacy="epsilon = 1.0", more="", source="") -> Path:
    path.write_text(more + PLAN.format(method=method, privacy=privacy, source=source))
    return path


def _rows(path: Path, clients: str = "abcde", targets=None) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "u", "v", "w", "y"])
        for client in clients:
            for row in range(8):
                y = rng.normal() if targets is None else targets[row % len(targets)]
                writer.writerow([client, *rng.normal(size=3), y])
    return path


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Path:
    """An app with development keys."""
    place = tmp_path_factory.mktemp("layout")
    plan = _plan(place / "plan.toml")
    folder = place / "Ward 7"
    given = ["deploy", "init", str(folder), "--plan", str(plan), "--sites", *SITES, *FACTS]
    assert main([*given, "--host", "link.example", "127.0.0.1"]) == 0
    return folder


def _fab(folder: Path) -> dict[str, bytes]:
    build = pytest.importorskip("flwr.cli.build")
    packed = zipfile.ZipFile(io.BytesIO(build.build_fab_from_disk(folder)))
    return {name: packed.read(name) for name in packed.namelist()}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower's own
def test_flower_packs_what_sites_need_and_no_key(app):
    (app / "rows.json").write_text("[1, 2, 3]")  # rows that somebody left there
    fab = _fab(app)
    assert set(fab) == {
        "pyproject.toml",
        "plan.toml",
        "federation.toml",
        "rows.py",
        "README.md",
        "ward_7_app/__init__.py",
        "ward_7_app/server.py",
        "ward_7_app/client.py",
        ".info/CONTENT",
    }
    assert fab["plan.toml"] == (app.parent / "plan.toml").read_bytes()
    assert fab["federation.toml"] == (app / "federation.toml").read_bytes()
    secrets = [path.read_bytes() for path in (app / "keys").rglob("*.key")]
    bodies = [line for pem in secrets for line in pem.splitlines()[1:-1]]
    assert len(secrets) == 6
    assert not [body for body in bodies for content in fab.values() if body in content]
    (app / "rows.json").unlink()


def test_flower_accepts_the_configuration(app):
    config = pytest.importorskip("flwr.common.config")
    seen = tomllib.loads((app / "pyproject.toml").read_text())
    valid, errors, warnings = config.validate_config(seen, check_module=False)
    assert (valid, errors, warnings) == (True, [], [])
    checked = pytest.importorskip("flwr.cli.config_utils").load_and_validate(app / "pyproject.toml")
    assert checked == (seen, [])  # as `flwr run` does it, modules and all
    assert config.get_metadata_from_config(seen) == ("coterie/Ward-7", "1.0.0")
    run = seen["tool"]["flwr"]["app"]["config"]
    key = load_private(app / run["key"])
    assert public_hex(key) == load_agreement(app).federation.coordinator


def test_the_apps_load_as_flower_loads_them(app):
    utils = pytest.importorskip("flwr.app")
    clientapp, serverapp = (
        pytest.importorskip(f"flwr.{name}") for name in ("clientapp", "serverapp")
    )
    assert utils
    seen = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    kinds = {"serverapp": serverapp.ServerApp, "clientapp": clientapp.ClientApp}
    for side, place in seen.items():
        module, _, name = place.partition(":")
        path = app / f"{module.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(f"layout_test_{side}", path)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        assert isinstance(getattr(found, name), kinds[side])


def test_the_federation_lists_sites_in_order(app):
    federation = load_agreement(app).federation
    assert federation.clients == ("a", "b", "c", "d", "e")
    assert list(federation.sites) == ["north", "south", "east"]
    assert federation.spec.shape == (3,)
    for name, site in federation.sites.items():
        key = load_private(app / "keys" / "sites" / name / "signing.key")
        assert public_hex(key) == site.key


def test_every_command_of_the_readme_is_one_that_exists(app):
    text = (app / "README.md").read_text()
    blocks = re.findall(r"(?m)(?:^    .*\n)+", text)
    joined = "\n".join(blocks).replace("\\\n", " ")
    commands = [shlex.split(line) for line in joined.splitlines() if line.strip()]
    starts = [words[0] for words in commands]
    assert starts.count("flower-supernode") == 3
    from coterie.cli.main import build_parser

    seen = [words[1:] for words in commands if words[0] == "coterie"]
    assert [words[1] for words in seen] == ["superlink", "status", "runs/Ward-7", "runs/Ward-7"]
    for words in seen:
        build_parser().parse_args(words)
    link = pytest.importorskip("flwr.superlink.cli.flower_superlink")
    node = pytest.importorskip("flwr.supernode.cli.flower_supernode")
    link._parse_args_run_superlink().parse_args(seen[0][seen[0].index("--") + 1 :])
    for words in commands:
        if words[0] == "flower-supernode":
            node._parse_args_run_supernode().parse_args(words[1:])
    assert [words[-1] for words in commands if words[:3] == ["flwr", "supernode", "register"]] == [
        "north",
        "south",
        "east",
    ]
    assert not [line for line in text.splitlines() if len(line) > 110]


@pytest.mark.parametrize("site", ["north", "south", "east"])
def test_the_usual_hook_reads_a_sites_rows(app, tmp_path, site):
    path = _rows(tmp_path / "all.csv")
    config = {"site": site, "data": str(path)}
    federation = load_agreement(app).federation
    data = read_rows({**config, "app": str(app)})
    assert tuple(data.names) == federation.sites[site].clients
    train, test = load_rows(load_agreement(app), site, app, config)
    assert tuple(train.names) == federation.clients
    own = [place for place, name in enumerate(train.names) if name in data.names]
    assert train.counts[own].tolist() == [6] * len(own)
    assert test.counts[own].tolist() == [2] * len(own)
    assert train.counts.sum() == 6 * len(own)


def test_the_hook_refuses_what_was_not_agreed_on(app, tmp_path):
    config = {"app": str(app), "site": "north"}
    with pytest.raises(DataError, match="without data"):
        read_rows(config)
    with pytest.raises(DataError, match="no rows of client 'b'"):
        read_rows({**config, "data": str(_rows(tmp_path / "a.csv", "a"))})
    wide = tmp_path / "wide.csv"
    wide.write_text("client,u,y\na,1.5,2.5\nb,1.5,2.5\n")
    with pytest.raises(DataError, match=r"expected \(3,\)"):
        read_rows({**config, "data": str(wide)})


def test_classes_that_a_site_would_read_off_its_rows_are_refused(tmp_path, capsys):
    facts = ["--task", "multiclass", "--features", "3", "--classes", "2"]
    rows = _rows(tmp_path / "rows.csv", targets=[0, 1])
    for name, source, fine in (
        ("open", '[data.source]\ntask = "multiclass"', False),
        ("declared", '[data.source]\ntask = "multiclass"\nclasses = 2', True),
    ):
        plan = _plan(tmp_path / f"{name}.toml", source=source)
        folder = tmp_path / name
        given = ["deploy", "init", str(folder), "--plan", str(plan), "--sites", *SITES, *facts]
        assert main(given) == 0
        config = {"app": str(folder), "site": "south", "data": str(rows)}
        # What sites will stumble over is said when the app is made.
        assert ("declare classes = 2 in" in capsys.readouterr().out) is not fine
        if fine:
            assert read_rows(config).targets.tolist() == [0, 1] * 4
        else:
            with pytest.raises(DataError, match="declare it"):
                read_rows(config)


@pytest.mark.parametrize(
    ("made", "more", "said"),
    [
        ({"method": "pooled", "privacy": "epsilon = inf"}, [], "in one place"),
        ({"more": "simulation_seed = 3\n"}, [], "protects nobody"),
        ({"more": "newcomers = 2\n"}, [], "newcomers"),
        ({}, ["--classes", "3"], "takes no --classes"),
        ({}, ["--trust", "nobody"], 'noise in shares and trust = "nobody" belong together'),
        ({}, ["--trust", "all"], None),
        ({}, ["--minimum", "3"], "minimum = 3"),
        ({"privacy": "epsilon = -1.0"}, [], "epsilon"),
    ],
)
def test_what_cannot_run_is_refused_and_nothing_is_left(tmp_path, capsys, made, more, said):
    plan = _plan(tmp_path / "plan.toml", **made)
    given = ["deploy", "init", str(tmp_path / "app"), "--plan", str(plan), "--sites", *SITES]
    if said is None:
        with pytest.raises(SystemExit):
            main([*given, *FACTS, *more])
    else:
        assert main([*given, *FACTS, *more]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        (["north"], "NAME=CLIENT"),
        (["north=a", "north=b"], "twice"),
        (["north=a", "south=a"], "listed twice"),
        (["../up=a"], "letters, digits"),
        (["north=@absent.txt"], "absent.txt cannot be read (No such file or directory); give"),
        (["Charité=a"], "ASCII letters"),
        (["north="], "NAME=CLIENT"),
    ],
)
def test_odd_sites_are_refused(tmp_path, capsys, sites, said):
    plan = _plan(tmp_path / "plan.toml")
    given = ["deploy", "init", str(tmp_path / "app"), "--plan", str(plan), "--sites", *sites]
    assert main([*given, *FACTS]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "app").exists()


def test_an_app_is_not_overwritten(app, capsys):
    before = (app / "plan.toml").read_bytes()
    plan = str(app.parent / "plan.toml")
    given = ["deploy", "init", str(app), "--plan", plan, "--sites", *SITES, *FACTS]
    assert main(given) == 2
    assert "exists" in capsys.readouterr().err
    assert (app / "plan.toml").read_bytes() == before


def test_a_federation_file_travels_byte_for_byte(app, tmp_path, capsys):
    text = "# ours\n" + (app / "federation.toml").read_text()
    (tmp_path / "federation.toml").write_text(text)
    plan = _plan(tmp_path / "plan.toml")
    given = ["deploy", "init", str(tmp_path / "b"), "--plan", str(plan), "--federation"]
    given += [str(tmp_path / "federation.toml")]
    assert main([*given, "--keys", str(app / "keys")]) == 0
    assert (tmp_path / "b" / "federation.toml").read_text() == text
    assert not (tmp_path / "b" / "keys").exists()
    config = tomllib.loads((tmp_path / "b" / "pyproject.toml").read_text())
    key = config["tool"]["flwr"]["app"]["config"]["key"]
    load_private(tmp_path / "b" / key)
    make_certificates(tmp_path / "others", ["north", "south", "east"])
    assert main([*given, "--keys", str(tmp_path / "others")]) == 2
    capsys.readouterr()
    assert main([*given[:2], str(tmp_path / "c"), *given[3:], "--task", "binary"]) == 2
    assert "goes with --sites" in capsys.readouterr().err


def _views(tmp_path: Path, capsys, name: str, privacy: str, trust: str) -> dict[str, object]:
    plan = _plan(tmp_path / f"{name}.toml", privacy=privacy)
    given = ["deploy", "init", str(tmp_path / name), "--plan", str(plan), "--sites", *SITES]
    assert main([*given, *FACTS, "--trust", trust, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["clients"] == 5
    assert seen["sites"] == 3
    assert seen["rounds"] == 4
    return seen["epsilon_by_view"]


def test_epsilon_is_said_by_view_and_trust(tmp_path, capsys):
    """Against the Gaussian's closed form: mu = sqrt(rounds) / z at full participation."""
    from math import sqrt

    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant  # an accountant of somebody else

    central = "noise_multiplier = 8.0\ndelta = 1e-5"
    accountant = rdp_privacy_accountant.RdpAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(8.0), 4))
    above = accountant.get_epsilon(1e-5)
    views = _views(tmp_path, capsys, "a", central, "server")
    assert views["coordinator"] == "inf"
    assert 0.5 * above < views["other_clients"] <= above
    assert set(views) == {"coordinator", "other_clients"}
    assert _views(tmp_path, capsys, "b", central, "secure_aggregation") == views
    local = 'noise_multiplier = 8.0\ndelta = 1e-5\nnoise = "local"'
    alone = _views(tmp_path, capsys, "c", local, "server")
    assert alone["coordinator"] == alone["other_clients"] == pytest.approx(views["other_clients"])
    summed = _views(tmp_path, capsys, "d", local, "secure_aggregation")
    assert summed["coordinator"] <= alone["coordinator"]
    assert sqrt(4) / 8 < alone["coordinator"] < 10


def test_a_seed_is_let_in_where_the_federation_says_so(tmp_path, capsys):
    plan = _plan(tmp_path / "plan.toml", more="simulation_seed = 3\n")
    given = ["deploy", "init", str(tmp_path / "app"), "--plan", str(plan), "--sites", *SITES]
    assert main([*given, *FACTS, "--simulation"]) == 0
    assert "protects nobody" in capsys.readouterr().out


def test_clients_can_come_from_a_file(tmp_path):
    (tmp_path / "names.txt").write_text("ward, one\nward two\n\n")
    plan = _plan(tmp_path / "plan.toml")
    given = ["deploy", "init", str(tmp_path / "app"), "--plan", str(plan), "--sites"]
    assert main([*given, f"north=@{tmp_path / 'names.txt'}", "south=c", *FACTS]) == 0
    assert load_agreement(tmp_path / "app").federation.clients == ("ward, one", "ward two", "c")


@pytest.mark.parametrize("name", ["app", "flwr", "7", "é é", "a" * 60, "x_y.z", "Ward 7 (north)"])
def test_names_are_those_that_flower_takes(tmp_path, name):
    utils = pytest.importorskip("flwr.supercore.utils")
    named = name_of(tmp_path / name)
    assert utils.is_valid_name(named) == (True, "")
    assert package_of(named).isidentifier()
    assert package_of(named) not in sys.stdlib_module_names


def test_a_broken_federation_is_named(tmp_path, capsys):
    plan = _plan(tmp_path / "plan.toml")
    path = tmp_path / "federation.toml"
    for text in ("task = ", 'task = "regression"\n', "[sites.north]\nclients = []\n"):
        path.write_text(text)
        given = ["deploy", "init", str(tmp_path / "app"), "--plan", str(plan), "--federation"]
        assert main([*given, str(path)]) == 2
        assert "federation" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        from_table(Federation, tomllib.loads(to_toml({"task": "odd"})), "federation")


@pytest.mark.parametrize(
    ("source", "fine"),
    [
        ("", False),
        ("[data.source]\nclasses = 2", True),
        ('[data.source]\ntask = "binary"', True),
        ('[data.source]\npositive = "1"', True),
    ],
)
def test_undeclared_classes_are_said_exactly_where_sites_refuse_them(
    tmp_path, capsys, source, fine
):
    """Oracle: what the usual hook does with a site's rows."""
    plan = _plan(tmp_path / "plan.toml", source=source)
    folder = tmp_path / "app"
    given = ["deploy", "init", str(folder), "--plan", str(plan), "--sites", *SITES]
    assert main([*given, "--task", "binary", "--features", "3", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)["notices"]
    rows = _rows(tmp_path / "rows.csv", targets=[0, 1])
    config = {"app": str(folder), "site": "south", "data": str(rows)}
    try:
        read_rows(config)
    except DataError:
        refused = True
    else:
        refused = False
    assert refused is not fine and bool(seen) is refused


def test_columns_that_were_left_out_are_named(app, tmp_path):
    path = tmp_path / "text.csv"
    path.write_text("client,sex,u,v,y\na,f,1.5,2.5,0.5\na,m,1.0,2.0,1.5\nb,f,1.5,2.5,2.5\n")
    with pytest.raises(DataError, match=r"columns read: u, v; text columns .* left out: sex"):
        read_rows({"app": str(app), "site": "north", "data": str(path)})


def test_the_readme_says_whose_keys_they_are(app, tmp_path):
    made = (app / "README.md").read_text()
    assert "link.example and 127.0.0.1. For another name make the app again" in made
    plan = _plan(tmp_path / "plan.toml")
    given = ["--plan", str(plan), "--federation", str(app / "federation.toml")]
    assert main(["deploy", "init", str(tmp_path / "own"), *given]) == 0
    own = (tmp_path / "own" / "README.md").read_text()
    assert "Each party keeps its own private key" in own and "keys/coordinator.key" in own
    keys = ["--keys", str(app / "keys")]
    assert main(["deploy", "init", str(tmp_path / "given"), *given, *keys]) == 0
    for text in (made, own, (tmp_path / "given" / "README.md").read_text()):
        # Keys made anew would not be those that federation.toml lists.
        assert "deploy certificates keys" not in text and "{" not in text


def test_whether_joining_pays_is_said_before_anything_is_spent(tmp_path, capsys):
    from coterie.planning.advice import Advice
    from coterie.planning.rules import advice_for

    plan = _plan(tmp_path / "plan.toml")
    given = ["deploy", "init", str(tmp_path / "a"), "--plan", str(plan), "--sites", *SITES, *FACTS]
    assert main(given) == 0
    said = capsys.readouterr().out
    agreed = load_agreement(tmp_path / "a")
    advice = advice_for(agreed.plan, agreed.federation.spec)
    assert isinstance(advice, Advice) and advice.verdict == "learn alone"
    assert str(advice) in said and str(advice).startswith("Learn alone: with ")
