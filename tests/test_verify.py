"""`coterie verify`: a healthy run of any kind verifies; every tampering is found.

Tampering comes in two strengths: a file is edited and nothing else, or the certificate is hashed
anew and the log removed, as a skilled hand would: then plan, ledger, posts and arithmetic stand.
"""

import copy
import hashlib
import io
import json
import math
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.choice import DataChoice
from coterie.cli import main
from coterie.methods.base import Shape, registered
from coterie.methods.fedavg import FedAvg
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pmtl import PMTL
from coterie.plan import Privacy
from coterie.privacy.noise import LocalNoise
from coterie.privacy.sampling import Everyone, FixedSize, Poisson
from coterie.privacy.spending import Geometric, Power
from coterie.run import execute
from coterie.run_plan import RunPlan
from coterie.verification.checks import verify
from coterie.verification.reading import UnreadableError, seal

pytestmark = pytest.mark.full


def plan_of(method=None, task="regression", **settings):
    options = {"clients": 12, "rows": [4, 8], "features": 3, "task": task}
    usual = {
        "data": DataChoice(name="synthetic", options=options),
        "method": method or PMTL(),
        "privacy": Privacy(epsilon=2.0),
        "rounds": 3,
        "simulation_seed": 1,
        "compare_with_local": False,
    }
    return RunPlan(**{**usual, **settings})


def run_into(folder, *args, **settings):
    execute(plan_of(*args, **settings), folder=folder)
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return run_into(tmp_path_factory.mktemp("verify") / "run")


@pytest.fixture
def run(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "run")


def failed(folder):
    return [check.name for check in verify(folder).checks if check.status != "ok"]


def certificate(folder):
    return json.loads((folder / "guarantee.json").read_text())


def store(folder, told):
    (folder / "guarantee.json").write_text(json.dumps(told, indent=2))


def store_skilfully(folder, told):
    """Hash anew what a certificate hashes, and drop the log that names another."""
    for name in told["files"]:
        if (folder / name).exists():
            told["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    told["sha256"] = seal(told)
    store(folder, told)
    (folder / "log.jsonl").unlink(missing_ok=True)


def absent_or_ok(folder):
    return {check.status for check in verify(folder).checks} <= {"ok", "not here"}


def test_a_healthy_run_verifies(healthy):
    assert failed(healthy) == [] and verify(healthy).verified
    assert len(certificate(healthy)["posts"]) == 3


def test_what_is_public_can_be_checked_without_the_rest(run):
    for name in ("models", "personal"):
        shutil.rmtree(run / name)
    for name in ("log.jsonl", "metrics.parquet", "result.json", "data.json", "model.json"):
        (run / name).unlink()
    assert verify(run).verified and failed(run) == ["clients", "log"]


def test_storing_skilfully_changes_nothing_by_itself(run):
    store_skilfully(run, certificate(run))
    assert absent_or_ok(run)


# Methods, noises, samplers: whatever can be run.


def first_that_runs(folder, kind):
    """Run a method on the task that it takes, private if it can be."""
    told = []
    for task in ("regression", "binary"):
        for epsilon in (2.0, math.inf):
            try:
                method = registered()[kind]()
                return run_into(folder, method, task, privacy=Privacy(epsilon=epsilon), rounds=2)
            except ValueError as error:
                told.append(str(error))
                shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError(told)


@pytest.mark.parametrize("kind", sorted(registered()))
def test_every_method_verifies(tmp_path, kind):
    folder = first_that_runs(tmp_path / "run", kind)
    assert failed(folder) == []
    told = certificate(folder)
    if registered()[kind]().shape in (Shape.NONE, Shape.POOLED):
        assert told["posts"] == []
    elif kind != "auto":
        assert told["rounds"] == len(told["posts"]) > 0


KINDS = {
    "laplace": {"privacy": Privacy(epsilon=2.0, noise="laplace")},
    "laplace at a delta": {"privacy": Privacy(epsilon=2.0, noise="laplace", delta=1e-5)},
    "wishart": {"method": MPMTL(), "privacy": Privacy(epsilon=2.0, noise="wishart")},
    "wishart_paper": {"method": MPMTL(), "privacy": Privacy(epsilon=2.0, noise="wishart_paper")},
    "moments replaced": {
        "method": MPMTL(),
        "privacy": Privacy(epsilon=2.0, relation="replace"),
        "sampler": Poisson(6),
    },
    "local": {"method": FedAvg(), "privacy": Privacy(epsilon=9.0, noise="local")},
    "local with honest clients": {
        "method": FedAvg(),
        "privacy": Privacy(epsilon=9.0, noise=LocalNoise(honest=5)),
    },
    "local_paper": {
        "method": FedAvg(),
        "privacy": Privacy(noise_multiplier=2.4, noise="local_paper"),
        "sampler": Poisson(4),
    },
    "hidden coins": {"sampler": Poisson(4)},
    "hidden coins, replaced": {
        "sampler": Poisson(4),
        "privacy": Privacy(epsilon=2.0, relation="replace"),
    },
    "visible coins": {"sampler": Poisson(4, visible=True)},
    "fixed": {"sampler": FixedSize(4), "privacy": Privacy(epsilon=2.0, relation="replace")},
    "fixed and visible": {"sampler": FixedSize(4, visible=True)},
    "everyone": {"sampler": Everyone()},
    "noise given": {"privacy": Privacy(noise_multiplier=4.0)},
    "noise given, by weights": {"privacy": Privacy(noise_multiplier=4.0, budget=(1.0, 2.0, 0.5))},
    "noise given, by a power": {"privacy": Privacy(noise_multiplier=4.0, spend=Power(0.4))},
    "noise given, geometric": {
        "privacy": Privacy(noise_multiplier=4.0, spend=Geometric(1.1)),
        "sampler": Poisson(5),
    },
    "laplace given": {"privacy": Privacy(noise_multiplier=4.0, noise="laplace")},
    "not private": {"privacy": Privacy(epsilon=math.inf)},
    "no seed": {"simulation_seed": None},
    "tuned": {"tuned": "not covered"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_noise_and_sampling_verifies(tmp_path, kind):
    assert failed(run_into(tmp_path / "run", **KINDS[kind])) == []


def test_a_run_without_privacy_may_end_early(tmp_path):
    method, folder = registered()["mtlsvm"](stop=0.5), tmp_path / "run"
    assert method.stop_gap is not None
    run_into(folder, method, "binary", privacy=Privacy(epsilon=math.inf), rounds=30)
    assert 0 < len(certificate(folder)["posts"]) < 30
    assert failed(folder) == []


# Tampering.


def numbers_in(value, path=()):
    """Give the paths of all numbers of a certificate."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers_in(part, (*path, key))
    elif isinstance(value, list):
        for key, part in enumerate(value):
            yield from numbers_in(part, (*path, key))
    elif isinstance(value, int | float):
        yield path


def changed(told, path, change):
    """Copy a certificate with one value changed."""
    told = copy.deepcopy(told)
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = change(place[path[-1]])
    return told


def off(step, share):
    """Change a number: a flag is turned, a count moves by one, a fraction by a share."""

    def change(value):
        if isinstance(value, bool):
            return not value
        return value + step if isinstance(value, int) else value * share

    return change


CHANGES = {"less": off(-1, 0.9), "more": off(1, 1.1)}


@pytest.mark.parametrize("skilled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_number_that_is_changed_is_found(run, change, skilled):
    told = certificate(run)
    paths = [path for path in numbers_in(told) if path != ("format_version",)]
    assert len(paths) > 10
    for path in paths:
        other = changed(told, path, CHANGES[change])
        assert other != told, path
        (store_skilfully if skilled else store)(run, other)
        assert not verify(run).verified, path
        found = [name for name in failed(run) if name not in ("log", "certificate unaltered")]
        assert found or not skilled, path


def lowered(told):
    told["epsilon"] = told["views"]["other_clients"] = 0.5 * told["epsilon"]


def noisier(told):
    """Raise the noise, and state the epsilon that it would have had."""
    told["events"][0]["noise_multiplier"] *= 2
    told["noise_multipliers"][0][0] *= 2
    told["epsilon"] = told["views"]["other_clients"] = 0.9477


def recount(rounds):
    def change(told):
        told["events"][0]["rounds"] = told["rounds"] = told["noise_multipliers"][0][1] = rounds

    return change


def restated(**fields):
    return lambda told: told.update(fields)


def reported(name):
    """Drop a field."""
    return lambda told: told.pop(name)


TAMPERINGS = {
    "epsilon lowered": (lowered, "epsilon"),
    "noise raised": (noisier, "events"),
    "an event removed": (recount(2), "counts"),
    "an event added": (recount(4), "counts"),
    "events reordered as another kind": (
        lambda told: told["events"].__setitem__(
            0, {"event": "laplace", "epsilon": 0.01, "rounds": 3}
        ),
        "events",
    ),
    "no events": (restated(events=[], rounds=0, epsilon=0.0), "counts"),
    "relation": (restated(relation="replace"), "plan"),
    "delta": (restated(delta=1e-3), "plan"),
    "sampling": (restated(sampling="everyone"), "plan"),
    "rate": (restated(rate=0.1), "plan"),
    "cohort": (restated(cohort="visible"), "plan"),
    "clients": (restated(clients=1200), "clients"),
    "simulation hidden": (restated(simulation=False), "plan"),
    "view": (restated(view="the server and the other clients"), "statement"),
    "warning removed": (
        lambda told: told.update(statement=told["statement"].partition("\n")[2]),
        "statement",
    ),
    "a post not listed": (lambda told: told["posts"].pop(), "posts"),
    "a post's hash": (lambda told: told["posts"][1].update(sha256="0" * 64), "posts"),
    "posts swapped": (lambda told: told["posts"].reverse(), "posts"),
    "a view removed": (lambda told: told["views"].pop("server"), "epsilon by view: server"),
    "a view made up": (
        lambda told: told["views"].update(server=1.0),
        "epsilon by view: server",
    ),
    "a file not listed": (lambda told: told["files"].pop("plan.toml"), "public files"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_certificate_that_was_rewritten_skilfully_is_found(run, name):
    change, check = TAMPERINGS[name]
    told = certificate(run)
    change(told)
    store_skilfully(run, told)
    assert check in failed(run)


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_certificate_that_was_edited_is_found(run, name):
    told = certificate(run)
    TAMPERINGS[name][0](told)
    store(run, told)
    assert {"certificate unaltered", "certificate well-formed"} & set(failed(run))


@pytest.mark.parametrize(
    "key", ["events", "posts", "delta", "files", "sha256", "statement", "views"]
)
def test_a_certificate_that_lacks_something_is_found(run, key):
    told = certificate(run)
    del told[key]
    store(run, told)
    assert failed(run) == ["certificate well-formed"]


@pytest.mark.parametrize(
    "event",
    [
        {"event": "gaussian", "noise_multiplier": -1.0, "replaced": 2.0, "rounds": 3},
        {"event": "gaussian", "noise_multiplier": 9.0, "replaced": 0.1, "rounds": 3},
        {"event": "gaussian", "noise_multiplier": True, "replaced": 2.0, "rounds": 3},
        {"event": "gaussian", "noise_multiplier": 9.0, "rounds": 3},
        {"event": "unheard_of", "rounds": 3},
        {"event": "non_private", "rounds": 0},
        "gaussian",
    ],
)
def test_an_event_that_is_none_is_found(run, event):
    told = certificate(run)
    told["events"] = [event]
    store_skilfully(run, told)
    assert failed(run) == ["certificate well-formed"]


def repacked(run, change):
    """Write posts.npz again with other entries."""
    with zipfile.ZipFile(run / "posts.npz") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries = change(entries)
    with zipfile.ZipFile(run / "posts.npz", "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def flipped(content):
    content = bytearray(content)
    content[-3] ^= 1
    return bytes(content)


def one_more(entries):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return {**entries, "000003.weight.npy": buffer.getvalue()}


def swap(entries):
    first, second = "000000.weight.npy", "000001.weight.npy"
    return {**entries, first: entries[second], second: entries[first]}


POSTS = {
    "missing": lambda entries: {k: v for k, v in entries.items() if not k.startswith("000001")},
    "a leaf missing": lambda entries: dict(list(entries.items())[1:]),
    "one bit": lambda entries: {
        **entries,
        "000002.weight.npy": flipped(entries["000002.weight.npy"]),
    },
    "swapped": swap,
    "one more": one_more,
    "something else": lambda entries: {**entries, "notes.txt": b"hello"},
    "reordered leaves": lambda entries: dict(reversed(entries.items())),
}


@pytest.mark.parametrize("name", POSTS)
def test_posts_that_were_altered_are_found(run, name):
    repacked(run, POSTS[name])
    assert {"public files", "posts"} <= set(failed(run))
    store_skilfully(run, certificate(run))
    assert "posts" in failed(run)


def test_posts_that_are_gone_are_found(run):
    (run / "posts.npz").unlink()
    assert {"public files", "posts"} <= set(failed(run))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_bit_of_a_public_file_counts(healthy, tmp_path_factory, data):
    run = shutil.copytree(healthy, tmp_path_factory.mktemp("bit") / "run")
    name = data.draw(st.sampled_from(["posts.npz", "ledger.jsonl", "plan.toml", "shared.npz"]))
    content = bytearray((run / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (run / name).write_bytes(content)
    assert not verify(run).verified
    shutil.rmtree(run)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_byte_of_a_certificate_counts(healthy, tmp_path_factory, data):
    """Digits and letters: white space between them says nothing."""
    run = shutil.copytree(healthy, tmp_path_factory.mktemp("byte") / "run")
    content = bytearray((run / "guarantee.json").read_bytes())
    places = [place for place, byte in enumerate(content) if chr(byte).isalnum()]
    content[data.draw(st.sampled_from(places))] ^= 1
    (run / "guarantee.json").write_bytes(content)
    with suppress(UnreadableError):
        assert not verify(run).verified
    shutil.rmtree(run)


def rewrite(run, change):
    lines = (run / "ledger.jsonl").read_text().splitlines()
    change(lines)
    (run / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines))


LEDGERS = {
    "a charge removed": lambda lines: lines.pop(3),
    "a release removed": lambda lines: lines.pop(4),
    "the last two removed": lambda lines: lines.__delitem__(slice(-2, None)),
    "a charge more": lambda lines: lines.append('{"charge": 3}'),
    "a charge twice": lambda lines: lines.append('{"charge": 2}'),
    "a release before its charge": lambda lines: lines.insert(1, lines.pop(2)),
    "a release of another content": lambda lines: lines.__setitem__(
        2, '{"release": 0, "sha256": "00"}'
    ),
    "another header": lambda lines: lines.__setitem__(
        0, json.dumps({**json.loads(lines[0]), "posts": 4})
    ),
    "other events": lambda lines: lines.__setitem__(
        0, json.dumps({**json.loads(lines[0]), "events": "0" * 64})
    ),
    "something else": lambda lines: lines.append('{"refund": 1}'),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_that_was_altered_is_found(run, name):
    rewrite(run, LEDGERS[name])
    assert "public files" in failed(run)
    store_skilfully(run, certificate(run))
    assert {"ledger", "counts", "events", "posts"} & set(failed(run))


def test_a_line_that_a_crash_cut_off_is_none(run):
    rewrite(run, lambda lines: lines.insert(3, '{"char'))
    store_skilfully(run, certificate(run))
    assert absent_or_ok(run)


PLANS = {
    "rounds = 3": "rounds = 4",
    "simulation_seed = 1\n": "",
    'relation = "zero_out"': 'relation = "replace"',
    "epsilon = 2.0": "epsilon = 1.0",
    "delta = 1e-05": "delta = 1e-06",
    'kind = "pmtl"': 'kind = "fedavg"',
    "visible = false": "visible = true",
    "[sampler]": "[sampler]\ncohort = 6.0",
    "epsilon = 2.0 ": "epsilon = inf",
}


@pytest.mark.parametrize("line", PLANS)
def test_a_plan_that_was_edited_is_found(run, line):
    text = (run / "plan.toml").read_text()
    assert line.strip() in text
    (run / "plan.toml").write_text(
        text.replace(line.strip("\n ") + "\n" * line.endswith("\n"), PLANS[line])
    )
    assert "public files" in failed(run)
    store_skilfully(run, certificate(run))
    assert {"plan", "budget", "counts"} & set(failed(run))


def test_noise_that_differs_from_the_plan_is_found(tmp_path):
    privacy = Privacy(noise_multiplier=4.0)
    run = run_into(tmp_path / "run", privacy=privacy)
    text = (run / "plan.toml").read_text()
    (run / "plan.toml").write_text(text.replace("noise_multiplier = 4.0", "noise_multiplier = 5.0"))
    store_skilfully(run, certificate(run))
    assert failed(run)[0] == "budget"


def test_models_of_other_clients_are_found(run, healthy, tmp_path):
    names = json.loads((run / "models/clients.json").read_text())
    (run / "models/clients.json").write_text(json.dumps(names[1:]))
    assert failed(run) == ["clients"]
    (run / "models/clients.json").write_text(json.dumps([*names[1:], names[1]]))
    assert failed(run) == ["clients"]


def test_more_honest_clients_than_a_round_has_are_found(tmp_path):
    noise = LocalNoise(honest=12)
    run = run_into(tmp_path / "run", FedAvg(), privacy=Privacy(epsilon=9.0, noise=noise))
    assert failed(run) == []
    told = certificate(run)
    told["events"][0]["honest"] = 13
    store_skilfully(run, told)
    assert "clients" in failed(run)


# The command.


def test_the_command_says_ok_and_exits_0(healthy, capsys):
    assert main(["verify", str(healthy)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"{healthy}: verified (")
    assert "recomputed" in out and "FAILED" not in out


def test_the_command_says_what_failed_and_exits_1(run, capsys):
    told = certificate(run)
    told["epsilon"] = 0.25
    store(run, told)
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert "NOT VERIFIED" in out
    line = next(line for line in out.splitlines() if "stated 0.25" in line)
    assert line.startswith("FAILED") and "recomputed 2" in line


def test_the_command_tells_machines(run, healthy, capsys):
    assert main(["verify", str(healthy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] and found["runs"][0]["verified"]
    assert {check["status"] for check in found["runs"][0]["checks"]} == {"ok"}
    (run / "posts.npz").unlink()
    assert main(["verify", str(healthy), str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["verified"]
    assert [one["verified"] for one in found["runs"]] == [True, False]


def test_a_folder_of_several_runs_is_gone_through(healthy, tmp_path, capsys):
    for name in ("one", "two"):
        shutil.copytree(healthy, tmp_path / "runs" / name)
    assert main(["verify", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.count(": verified (") == 2
    (tmp_path / "runs" / "two" / "posts.npz").unlink()
    assert main(["verify", str(tmp_path / "runs")]) == 1
    assert "public files" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage", ["no folder", "nothing", "no JSON", "older", "later", "unfinished"]
)
def test_what_cannot_be_read_exits_2(run, capsys, damage):
    path, told = run / "guarantee.json", certificate(run)
    if damage == "no folder":
        run = run / "elsewhere"
    elif damage == "nothing":
        shutil.rmtree(run)
        run.mkdir()
    elif damage == "no JSON":
        path.write_text("{")
    elif damage == "older":
        del told["format"]
        store(run, told)
    elif damage == "later":
        store(run, {**told, "format_version": 2})
    else:
        path.unlink()
    assert main(["verify", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("coterie verify: ") and err.count("\n") == 1


def test_checking_changes_nothing(healthy):
    before = {path: path.stat().st_mtime_ns for path in healthy.rglob("*")}
    verify(healthy)
    assert {path: path.stat().st_mtime_ns for path in healthy.rglob("*")} == before


def test_checking_loads_nothing_of_training(healthy):
    """Nor torch, nor the library that training accounts with."""
    code = (
        "import sys; from pathlib import Path; from coterie.verification.checks import verify; "
        f"assert verify(Path({str(healthy)!r})).verified; "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in "
        "('coterie', 'torch', 'dp_accounting', 'numba', 'pyarrow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if not name.startswith("coterie.verification")} == {"coterie"}
