"""What the owner declares, and public inputs: in the certificate, and checked against the plan."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.cli.main import main
from coterie.core.config import read_toml
from coterie.core.environment import code_of
from coterie.data.config import DataConfig
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.planning.about import About, PublicInput, digest_of
from coterie.planning.plan import Plan, Privacy
from coterie.runs.run import execute
from coterie.verification import verify
from coterie.verification.certificate import seal

DECLARED = {
    "unit": "one hospital with all its patients",
    "operator": "Consortium",
    "purpose": "readmission",
    "contact": "dpo@example.org",
    "data_period": "2019 to 2023",
    "region": "Norway",
}
CLUSTERS = "method.clusters"
START = "method.model.start"
ENCODER = "encoder of notes"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("public")
    arrays = {"weight": np.zeros((1, 3), np.float32), "bias": np.zeros(1, np.float32)}
    np.savez(folder / "start.npz", **arrays)
    (folder / "encoder.bin").write_bytes(b"weights of an encoder")
    return folder


def plan_of(files, about):
    options = {"clients": 12, "rows": [4, 8], "features": 3}
    return Plan(
        method=PMTL(model=Linear(start=str(files / "start.npz")), clusters=(0, 1) * 6),
        privacy=Privacy(epsilon=2.0),
        data=DataConfig(name="synthetic", options=options),
        rounds=2,
        simulation_seed=1,
        compare_with_local=False,
        about=about,
    )


def about_of(files):
    return About(
        **DECLARED,
        inputs=(
            PublicInput(name=START, source="doi:1", licence="CC0", no_private_rows=True),
            PublicInput(name=ENCODER, file=str(files / "encoder.bin"), kind="encoder"),
        ),
    )


@pytest.fixture(scope="module")
def healthy(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("declared") / "run"
    execute(plan_of(files, about_of(files)), folder=folder)
    return folder


@pytest.fixture
def run(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "run")


def certificate(folder):
    return json.loads((folder / "guarantee.json").read_text())


def store(folder, told, *, skilfully):
    """Write a certificate; a skilled forger hashes it anew, and removes the log that names it."""
    if skilfully:
        told["sha256"] = seal(told)
        (folder / "log.jsonl").unlink(missing_ok=True)
    (folder / "guarantee.json").write_text(json.dumps(told, indent=2))


def failed(folder):
    return [check.name for check in verify(folder).checks if check.status == "FAILED"]


def sha(content):
    return hashlib.sha256(content).hexdigest()


def test_the_certificate_has_what_was_declared(healthy, files):
    told = certificate(healthy)
    assert told["about"] == DECLARED
    inputs = {one["name"]: one for one in told["inputs"]}
    assert inputs.keys() == {CLUSTERS, START, ENCODER}
    assert inputs[START] == {
        "name": START,
        "kind": "start weights",
        "hashed": "file",
        "sha256": sha((files / "start.npz").read_bytes()),
        "source": "doi:1",
        "licence": "CC0",
        "no_private_rows": True,
    }
    assert inputs[ENCODER]["sha256"] == sha(b"weights of an encoder")
    assert inputs[ENCODER]["kind"] == "encoder" and inputs[ENCODER]["source"] is None
    assert inputs[CLUSTERS]["sha256"] == sha(json.dumps([0, 1] * 6, separators=(",", ":")).encode())
    assert not inputs[CLUSTERS]["no_private_rows"]
    assert failed(healthy) == []


def test_declarations_change_no_release_and_no_binding_of_the_ledger(healthy, files, tmp_path):
    """The same seed, with and without declarations: the same releases, the same plan digest."""
    execute(plan_of(files, None), folder=tmp_path / "bare")
    bare, declared = certificate(tmp_path / "bare"), certificate(healthy)
    assert bare["posts"] == declared["posts"] and "about" not in bare
    assert failed(tmp_path / "bare") == []
    heads = [
        json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
        for folder in (tmp_path / "bare", healthy)
    ]
    assert heads[0]["plan"] == heads[1]["plan"]


def test_a_certificate_of_an_earlier_version_verifies(files, tmp_path):
    execute(plan_of(files, None), folder=tmp_path / "run")
    told = certificate(tmp_path / "run")
    del told["inputs"]
    for name in ("coterie_files", "coterie_commit"):
        told["versions"].pop(name, None)
    store(tmp_path / "run", told, skilfully=True)
    assert failed(tmp_path / "run") == [] and verify(tmp_path / "run").verified


def change(told, key, value):
    if key in told["about"]:
        told["about"][key] = value
    elif key == "drop":
        told["inputs"] = [one for one in told["inputs"] if one["name"] != value]
    else:
        name, _, field = key.partition("/")
        next(one for one in told["inputs"] if one["name"] == name)[field] = value


TAMPERED = [
    *((key, "somebody else") for key in DECLARED),
    *((f"{START}/{key}", "other") for key in ("source", "licence", "kind", "name")),
    (f"{START}/no_private_rows", False),
    (f"{ENCODER}/no_private_rows", True),
    (f"{ENCODER}/kind", "other"),
    (f"{CLUSTERS}/sha256", "0" * 64),
    (f"{CLUSTERS}/hashed", "file"),
    *(("drop", name) for name in (START, CLUSTERS, ENCODER)),
]


@pytest.mark.parametrize(("key", "value"), TAMPERED, ids=str)
def test_every_tampering_with_a_declaration_is_found(run, key, value):
    told = certificate(run)
    change(told, key, value)
    store(run, told, skilfully=False)
    assert "certificate unaltered" in failed(run)
    store(run, told, skilfully=True)
    assert failed(run) == ["declarations"]


def test_hashes_of_files_and_versions_are_sealed(run):
    """No plan has them: a skilled forger can change them, and a signature finds that."""
    for key, value in ((f"{START}/sha256", "0" * 64), (f"{ENCODER}/sha256", None)):
        told = certificate(run)
        change(told, key, value)
        store(run, told, skilfully=False)
        assert "certificate unaltered" in failed(run)
    told = certificate(run) | {"versions": {"coterie_files": "0" * 64}}
    store(run, told, skilfully=False)
    assert "certificate unaltered" in failed(run)


def test_removed_declarations_are_found(run):
    told = certificate(run)
    store(run, {key: value for key, value in told.items() if key != "about"}, skilfully=True)
    assert failed(run) == ["declarations"]
    store(run, {key: value for key, value in told.items() if key != "inputs"}, skilfully=True)
    assert failed(run) == ["declarations"]


MALFORMED = [
    {"about": ["unit"]},
    {"about": {"statement": "epsilon = 0"}},
    {"about": {"unit": "x" * 121}},
    {"about": {"unit": ""}},
    {"about": {"unit": "two\nlines"}},
    {"about": {"unit": "reversed \u202e text"}},
    {"about": {"unit": 3}},
    {"inputs": {}},
    {"inputs": [{"name": "x"}]},
    {"versions": {"coterie": 1}},
    {"versions": {"coterie": "a\x1b[2J"}},
]


@pytest.mark.parametrize("fields", MALFORMED, ids=str)
def test_malformed_declarations_are_found(run, fields):
    store(run, certificate(run) | fields, skilfully=True)
    assert failed(run) == ["certificate well-formed"]


def test_an_edited_plan_is_found(run):
    path = run / "plan.toml"
    path.write_text(path.read_text().replace(DECLARED["unit"], "one patient"))
    assert "declarations" in failed(run) and "ledger" in failed(run)


@given(st.text(max_size=40) | st.integers(118, 123).map("x".__mul__))
def test_texts_are_one_short_printable_line(text):
    good = 0 < len(text) <= 120 and text.isprintable() and bool(text.strip())
    try:
        About(unit=text)
    except ValueError as error:
        assert not good
        assert str(error).isprintable()
    else:
        assert good


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((PublicInput(name="method.nothing"),), "expected a public input of the plan"),
        ((PublicInput(name=CLUSTERS, file="x"),), "expected a public input of the plan"),
    ],
)
def test_inputs_are_those_of_the_plan(files, inputs, said):
    with pytest.raises(ValueError, match=said):
        plan_of(files, About(inputs=inputs))
    with pytest.raises(ValueError, match="declared twice"):
        About(inputs=(PublicInput(name="a"), PublicInput(name="a")))
    with pytest.raises(ValueError, match="kind and no file"):
        PublicInput(name="a", kind="encoder")


def test_ranges_read_off_the_rows_had_private_rows(files):
    plan = plan_of(files, None)
    source = replace(plan.data.source, ranges={"x": (0.0, 1.0)}, accepted=("ranges of x",))
    declared = PublicInput(name="data.source.ranges", no_private_rows=True)
    data = replace(plan.data, name="rows.csv", options={}, source=source)
    with pytest.raises(ValueError, match=r"contradicts data\.source\.accepted"):
        replace(plan, data=data, about=About(inputs=(declared,)))
    replace(plan, data=data, about=About(inputs=(replace(declared, no_private_rows=False),)))


def test_a_plan_with_declarations_is_the_same_after_a_file(healthy, files):
    plan = plan_of(files, about_of(files))
    assert Plan.load(healthy / "plan.toml", trust=False).about == plan.about
    assert read_toml(healthy / "plan.toml")["about"]["unit"] == DECLARED["unit"]


def test_text_that_looks_like_code_is_text(files, run):
    text = (run / "plan.toml").read_text().replace(DECLARED["unit"], "hospital:patients")
    (run / "plan.toml").write_text(text)
    assert Plan.load(run / "plan.toml", trust=False).about.unit == "hospital:patients"


def test_flags_declare_and_are_refused_with_resume(tmp_path, capsys):
    out = tmp_path / "run"
    run = ["run", "--data", "synthetic", "--option", "clients=12", "--rounds", "2"]
    run += ["--method", "pmtl", "--no-local", "--no-history"]
    run += ["--simulation-seed", "1", "--quiet", "--out", str(out)]
    flags = ["--unit", "one ward", "--operator", "Consortium", "--purpose", "beds"]
    assert main([*run, *flags]) == 0
    assert '"one ward" (the owner\'s words' in capsys.readouterr().out
    told = certificate(out)["about"]
    assert told == {"unit": "one ward", "operator": "Consortium", "purpose": "beds"}
    assert main(["run", "--resume", str(out), "--unit", "one patient"]) == 2
    assert "--unit" in capsys.readouterr().err
    assert main([*run[:-1], str(tmp_path / "other"), "--unit", "two\nlines"]) == 2
    assert "one line of printable text" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_statement_has_the_unit(files):
    declared, bare = (plan_of(files, about).guarantee(12) for about in (about_of(files), None))
    assert '"one hospital with all its patients" (the owner\'s words for one client' in str(
        declared.statement()
    )
    assert "owner" not in bare.statement()
    assert declared.epsilon == bare.epsilon
    again = type(declared).from_json(declared.to_json())
    assert again.unit == DECLARED["unit"] and again == declared


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of a few files, as if it were imported."""
    folder = tmp_path / "site" / "demo"
    (folder / "part").mkdir(parents=True)
    for name in ("__init__.py", "a.py", "B.py", "part/__init__.py", "a_b.py", "page.j2"):
        (folder / name).write_text(f"# {name}")
    monkeypatch.setitem(sys.modules, "demo", SimpleNamespace(__file__=str(folder / "__init__.py")))
    code_of.cache_clear()
    yield folder
    code_of.cache_clear()


def git(folder, *arguments):
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_hash_of_the_code_is_that_of_the_shell(package):
    command = "find . -name '*.py' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    shown = subprocess.run(["bash", "-c", command], cwd=package, check=True, capture_output=True)
    assert code_of("demo") == {"demo_files": shown.stdout.decode().split()[0]}


def test_the_commit_is_that_of_the_checkout(package, monkeypatch):
    git(package.parent, "init", "-q")
    (package.parent / "other.txt").write_text("of the user")
    git(package.parent, "add", "other.txt")
    git(package.parent, "commit", "-qm", "one")
    assert "demo_commit" not in code_of("demo")  # installed inside somebody's repository
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "two")
    code_of.cache_clear()
    head = git(package.parent, "rev-parse", "HEAD")
    assert code_of("demo")["demo_commit"] == head
    (package / "a.py").write_text("# changed")
    code_of.cache_clear()
    assert code_of("demo")["demo_commit"] == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    code_of.cache_clear()
    assert list(code_of("demo")) == ["demo_files"]  # without git


def test_a_digest_is_that_of_canonical_json():
    assert digest_of({"b": (1.5, 2.0), "a": "ü"}) == sha(b'{"a":"\\u00fc","b":[1.5,2.0]}')
