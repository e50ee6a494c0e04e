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
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.cli.main import main
from coterie.core.tree import map_arrays
from coterie.data.config import DataConfig, Source
from coterie.methods import base
from coterie.methods.base import Shape, registered
from coterie.methods.fedavg import FedAvg
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.calibrate import Geometric, Power
from coterie.privacy.events import Gaussian
from coterie.privacy.ledger import Ledger, LedgerError
from coterie.privacy.mechanisms import GaussianSum
from coterie.privacy.noise import BandedNoise, GaussianNoise, LocalNoise, Noise, SharedNoise
from coterie.privacy.sampling import Cyclic, Everyone, FixedSize, Poisson
from coterie.runs.run import execute
from coterie.verification import UnreadableError, verify
from coterie.verification.account import Account, Span, by_view
from coterie.verification.certificate import seal
from coterie.verification.folder import _compared, read_ledger

pytestmark = pytest.mark.full


def plan_of(method=None, task="regression", **settings):
    options = {"clients": 12, "rows": [4, 8], "features": 3, "task": task}
    usual = {
        "data": DataConfig(name="synthetic", options=options),
        "method": method or PMTL(),
        "privacy": Privacy(epsilon=2.0),
        "rounds": 3,
        "simulation_seed": 1,
        "compare_with_local": False,
    }
    return Plan(**{**usual, **settings})


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
    "a public schedule": {"sampler": Cyclic(2), "rounds": 7},
    "a public schedule, replaced": {
        "sampler": Cyclic(3),
        "privacy": Privacy(epsilon=2.0, relation="replace", spend=Power()),
    },
    "banded": {
        "sampler": Cyclic(2),
        "privacy": Privacy(epsilon=2.0, noise=BandedNoise()),
        "rounds": 7,
    },
    "banded blocks": {
        "method": PFEB(),
        "sampler": Cyclic(2),
        "privacy": Privacy(epsilon=2.0, noise=BandedNoise()),
    },
    "shares by a public schedule": {
        "sampler": Cyclic(2),
        "privacy": Privacy(epsilon=2.0, noise=SharedNoise()),
    },
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


# Methods and mechanisms of other packages.


@dataclass(frozen=True)
class Uniform(GaussianSum):
    """A mechanism with noise of its own, sums of uniform numbers, and no grid."""

    def draws(self, totals):
        return 0

    def perturb(self, total, entropy):
        scale = self.noise_multiplier * self.bound
        noisy = {}
        for name, leaf in total.items():
            drawn = entropy.words(12 * leaf.numel()).reshape(12, *leaf.shape)
            noisy[name] = leaf.numpy() + scale * (drawn / 2.0**64 - 0.5).sum(axis=0)
        return map_arrays(noisy)

    def grid(self, totals):
        return None


@dataclass(frozen=True)
class Pretender(Uniform):
    """The same, which states the grid of `GaussianSum`."""

    def grid(self, totals):
        return GaussianSum.grid(self, totals)


@dataclass(frozen=True)
class UniformNoise(GaussianNoise):
    """A kind of noise of another package, accounted as Gaussian events."""

    kind: ClassVar[str] = "uniform"
    pretends: bool = False

    def _one(self, request, multiplier):
        return (Pretender if self.pretends else Uniform)(request.clip, multiplier)


@pytest.fixture
def uniform(monkeypatch):
    kinds = {**Noise.choices(), UniformNoise.kind: UniformNoise}
    monkeypatch.setattr(Noise, "choices", classmethod(lambda cls: kinds))


def test_a_method_of_another_package_that_releases_nothing_verifies(tmp_path, monkeypatch):
    for name in ("_METHODS", "_ABOUT"):
        monkeypatch.setattr(base, name, dict(getattr(base, name)))

    @base.register("quiet")
    @dataclass(frozen=True, kw_only=True)
    class Quiet(registered()["local"]):
        """A method whose name nobody knows."""

    run = run_into(tmp_path / "run", Quiet())
    told = certificate(run)
    assert (told["method"], told["shape"], told["events"]) == ("quiet", "none", [])
    assert failed(run) == []
    store_wholly(run, told | {"shape": "sum"})
    assert "counts" in failed(run)


@pytest.mark.parametrize("given", [{"epsilon": 2.0}, {"noise_multiplier": 4.0}])
def test_noise_of_another_package_verifies(tmp_path, uniform, given):
    run = run_into(tmp_path / "run", privacy=Privacy(noise=UniformNoise(), **given))
    (event,), (release,) = (certificate(run)[key] for key in ("events", "releases"))
    assert (event["event"], event["rounds"]) == ("gaussian", release["rounds"])
    assert failed(run) == []
    (check,) = (one for one in verify(run).checks if one.name == "grid")
    assert check.found == "no grid for bias, weight: the mechanism states none"


def test_a_release_that_is_not_on_its_grid_is_found(tmp_path, uniform):
    privacy = Privacy(epsilon=2.0, noise=UniformNoise(pretends=True))
    assert failed(run_into(tmp_path / "run", privacy=privacy)) == ["grid"]


def test_a_run_without_privacy_may_end_early(tmp_path):
    method, folder = registered()["mtlsvm"](stop=0.5), tmp_path / "run"
    run_into(folder, method, "binary", privacy=Privacy(epsilon=math.inf), rounds=30)
    assert 0 < len(certificate(folder)["posts"]) < 30
    assert failed(folder) == []


# Tampering.


def numbers_in(value, path=()):
    """Return the paths of all numbers of a certificate."""
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
        assert set(failed(run)) - ({"log"} if skilled else set()), path


def lowered(told):
    told["epsilon"] = told["views"]["other_clients"] = 0.5 * told["epsilon"]


def noisier(told):
    """Raise the noise, and state the epsilon that it would have had."""
    told["events"][0]["noise_multiplier"] *= 2
    told["epsilon"] = told["views"]["other_clients"] = 0.9477


def recount(rounds):
    def change(told):
        told["events"][0]["rounds"] = told["rounds"] = told["releases"][0]["rounds"] = rounds

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
    "tuning": (restated(tuning="public"), "plan"),
    "shape": (restated(shape="none"), "counts"),
    "a bound": (lambda told: told["releases"][0]["parts"][0].update(bound=0.4), "bounds"),
    "a norm": (lambda told: told["releases"][0]["parts"][0].update(norm=1), "bounds"),
    "a finer grid": (lambda told: told["releases"][0]["parts"][0].update(grid=2.0**-60), "bounds"),
    "a coarser grid": (lambda told: told["releases"][0]["parts"][0].update(grid=0.25), "grid"),
    "a grid of no leaf": (
        lambda told: told["releases"][0]["parts"][0].update(leaves=["weight"]),
        "grid",
    ),
    "a post not listed": (lambda told: told["posts"].pop(), "releases"),
    "a post's hash": (lambda told: told["posts"][1].update(sha256="0" * 64), "releases"),
    "posts swapped": (lambda told: told["posts"].reverse(), "releases"),
    "a view removed": (lambda told: told["views"].pop("server"), "epsilon by view: server"),
    "a view made up": (
        lambda told: told["views"].update(server=1.0),
        "epsilon by view: server",
    ),
    "a file not listed": (lambda told: told["files"].pop("plan.toml"), "public files"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_certificate_that_was_altered_is_found(run, name):
    change, check = TAMPERINGS[name]
    told = certificate(run)
    change(told)
    store(run, told)
    assert {"certificate unaltered", "certificate well-formed"} & set(failed(run))
    store_skilfully(run, told)
    assert check in failed(run)


def part(**fields):
    whole = {"leaves": ["weight", "bias"], "norm": 2, "bound": 0.5, "grid": 2.0**-20}
    return {"releases": [{"rounds": 3, "parts": [whole | fields]}]}


def event(kind, **fields):
    return {"events": [{"event": kind, "rounds": 3} | fields]}


MALFORMED = [
    event("gaussian", noise_multiplier=-1.0, replaced=2.0),
    event("gaussian", noise_multiplier=9.0, replaced=0.1),
    event("gaussian", noise_multiplier=True, replaced=2.0),
    event("gaussian", noise_multiplier=10**400, replaced=2.0),
    event("gaussian", noise_multiplier=9.0),
    event("unheard_of"),
    event(["gaussian"]),
    event({}),
    event("non_private", rounds=0),
    event("non_private", rounds=10**30),
    {"events": ["gaussian"]},
    {"clients": 0},
    {"clients": -5},
    {"clients": 10**400},
    {"clients": 12.0},
    {"rounds": 10**30},
    {"posts": [{"index": [1], "sha256": "a"}]},
    {"posts": [{"index": True, "sha256": "a"}]},
    part(norm=3),
    part(norm=True),
    part(grid="fine"),
    part(bound=-1.0),
    part(leaves=[]),
    {"releases": [{"rounds": 3, "parts": []}]},
    {"protected_rows": 1.5},
    {"unit": "household"},
    {"statement": "epsilon = 0.01"},
    *({key: None} for key in ("events", "posts", "delta", "files", "shape", "views")),
]


@pytest.mark.parametrize("fields", MALFORMED, ids=str)
def test_a_certificate_that_is_malformed_is_found(run, fields):
    told = certificate(run) | fields
    if told["files"] is not None:
        store_skilfully(run, told)
    else:
        store(run, told)
    assert failed(run) == ["certificate well-formed"]


def test_a_certificate_that_lacks_a_field_is_found(run):
    told = certificate(run)
    for key in set(told) - {"format", "format_version", "inputs"}:  # earlier versions had no inputs
        store(run, {name: value for name, value in told.items() if name != key})
        assert failed(run) == ["certificate well-formed"], key


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
    assert {"public files", "releases"} <= set(failed(run))
    store_skilfully(run, certificate(run))
    assert "releases" in failed(run)


def test_posts_that_are_gone_are_found(run):
    (run / "posts.npz").unlink()
    assert {"public files", "releases"} <= set(failed(run))


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
    """Digits and letters: white space between them says nothing.

    Nor does the last digit of a number that is read as the same number.
    """
    run = shutil.copytree(healthy, tmp_path_factory.mktemp("byte") / "run")
    content, told = bytearray((run / "guarantee.json").read_bytes()), certificate(healthy)
    places = [place for place, byte in enumerate(content) if chr(byte).isalnum()]
    content[data.draw(st.sampled_from(places))] ^= 1
    (run / "guarantee.json").write_bytes(content)
    with suppress(UnreadableError):
        assert not verify(run).verified or json.loads(content) == told
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
    assert {"ledger", "counts", "events", "releases"} & set(failed(run))


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
    shutil.rmtree(run / "models")
    assert "FAILED" in {one.status for one in verify(run).checks if one.name == "clients"}


# Claims that contradict what lies beside them: the ledger is rewritten too, where it can be.


def store_wholly(folder, told):
    """Have the ledger name the plan and the events as they lie there now, and store skilfully."""
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    named = [
        {k: float(v) if isinstance(v, int | float) else v for k, v in event.items()}
        for event in told["events"]
    ]
    header = json.loads(lines[0]) | {
        "plan_file": hashlib.sha256((folder / "plan.toml").read_bytes()).hexdigest(),
        "events": hashlib.sha256(repr(named).encode()).hexdigest(),
        "posts": told["rounds"],
    }
    lines[0] = json.dumps(header)
    (folder / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines))
    store_skilfully(folder, told)


def recounted(told):
    """State the epsilons that the events of a certificate come to."""
    views = {
        view: "inf" if span.low == math.inf else span.low * (1 + 1e-9)
        for view, span in by_view(Account.of(told)).items()
    }
    told["epsilon"] = views.pop("epsilon")
    told["views"] = views


def replan(run, *changes):
    text = (run / "plan.toml").read_text()
    for line, other in changes:
        assert line in text, line
        text = text.replace(line, other)
    (run / "plan.toml").write_text(text)


def test_storing_wholly_changes_nothing_by_itself(run):
    store_wholly(run, certificate(run))
    assert absent_or_ok(run)


EVENTS = {
    "ten times the noise": {"event": "gaussian", "noise_multiplier": 32.9, "replaced": 2.0},
    "clients' own noise": {
        "event": "local_gaussian",
        "noise_multiplier": 3.29,
        "honest": 12,
        "claimed": None,
    },
    "laplace": {"event": "laplace", "epsilon": 0.001},
    "wishart": {"event": "wishart", "degrees": 1000, "ratio": 1e-3, "claimed": None},
}


@pytest.mark.parametrize("name", EVENTS)
def test_events_that_the_plan_would_not_have_made_are_found(run, name):
    told = certificate(run)
    told["events"] = [EVENTS[name] | {"rounds": 3}]
    recounted(told)
    store_wholly(run, told)
    assert "budget" in failed(run)


@pytest.mark.parametrize("sampler", [Poisson(6), FixedSize(6)])
def test_noise_in_shares_is_made_for_the_coordinator_whoever_is_drawn(tmp_path, sampler):
    privacy = Privacy(epsilon=2.0, noise=SharedNoise(), relation="replace")
    run = run_into(tmp_path / "run", privacy=privacy, sampler=sampler)
    views = certificate(run)["views"]
    assert views["coordinator_and_corrupt"] == pytest.approx(2.0)
    assert views["other_clients"] < 1.9 and failed(run) == []
    replan(run, ("epsilon = 2.0", f"epsilon = {views['other_clients']}"))
    store_wholly(run, certificate(run))
    assert failed(run)[0] == "budget"


@pytest.mark.parametrize("method", [PMTL(), MPMTL()])
def test_a_replaced_client_that_moves_a_sum_too_little_is_found(tmp_path, method):
    """Nothing under zero_out depends on it, but epsilon under replace, which reports state."""
    run = run_into(tmp_path / "run", method)
    told = certificate(run)
    store_wholly(run, told)
    assert absent_or_ok(run)
    for event in told["events"]:
        event["replaced"] = 1.0
    recounted(told)
    store_wholly(run, told)
    assert "bounds" in failed(run)


@pytest.mark.parametrize("counts", [(1208, 1200), (12, 4), (8, 7)])
@pytest.mark.parametrize("declared", [False, True])
def test_shares_of_other_clients_than_the_plan_counts_on_are_found(tmp_path, counts, declared):
    """Of 12 clients 8 answer, by default, and none colludes."""
    noise = SharedNoise(*((8, 0) if declared else ()))
    run = run_into(tmp_path / "run", privacy=Privacy(epsilon=2.0, noise=noise))
    told = certificate(run)
    store_wholly(run, told)
    assert absent_or_ok(run)
    for event in told["events"]:
        event["minimum_clients"], event["corrupt"] = counts
    recounted(told)
    store_wholly(run, told)
    wrong = failed(run)
    assert "budget" in wrong and ("clients" in wrong) is (counts[0] > 12)


def test_no_events_of_a_method_that_posts_are_found(run):
    told = certificate(run)
    told |= {"events": [], "posts": [], "rounds": 0, "releases": []}
    recounted(told)
    for planned in (0, 3):
        rewrite(run, lambda lines: lines.__delitem__(slice(1, None)))
        with zipfile.ZipFile(run / "posts.npz", "w"):
            pass
        store_wholly(run, told)
        rewrite(
            run,
            lambda lines, planned=planned: lines.__setitem__(
                0, json.dumps(json.loads(lines[0]) | {"posts": planned})
            ),
        )
        store_skilfully(run, told)
        assert "counts" in failed(run)


FORGED = {
    "the seed": (("simulation_seed = 1\n", ""), {"simulation": False}),
    "delta": (("delta = 1e-05", "delta = 0.5"), {"delta": 0.5}),
    "the rate": (("[sampler]", "[sampler]\ncohort = 1.2"), {"rate": 1e-3, "clients": 1200}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_plan_that_was_forged_with_its_certificate_is_found(run, name):
    change, fields = FORGED[name]
    replan(run, change)
    told = certificate(run) | fields
    recounted(told)
    shutil.rmtree(run / "models")
    store_skilfully(run, told)
    assert "ledger" in failed(run)


def test_a_condition_that_the_plan_states_and_the_certificate_does_not_is_found(tmp_path):
    rows = [f"c{at % 9},{at % 7}.5,{at % 5}.5" for at in range(90)]
    (tmp_path / "rows.csv").write_text("client,x,y\n" + "\n".join(rows) + "\n")
    source = Source(task="regression", features=("x",), accepted=("ranges of x",))
    data = DataConfig(name=str(tmp_path / "rows.csv"), source=source)
    run = run_into(tmp_path / "run", data=data)
    assert failed(run) == [] and certificate(run)["assumed_public"] == ["ranges of x"]
    store_skilfully(run, certificate(run) | {"assumed_public": []})
    assert "plan" in failed(run)


def test_a_ledger_that_names_no_plan_is_refused_clearly(run):
    def older(lines):
        header = json.loads(lines[0])
        del header["plan_file"]
        lines[0] = json.dumps(header)

    rewrite(run, older)
    store_skilfully(run, certificate(run))
    (check,) = (one for one in verify(run).checks if one.status == "FAILED")
    assert check.name == "ledger" and "earlier version" in check.found


def test_a_ledger_is_bound_to_the_plan_beside_it(tmp_path):
    path, events = tmp_path / "ledger.jsonl", [Gaussian(2.0)] * 2
    (tmp_path / "plan.toml").write_text("rounds = 2\n")
    Ledger(events, path, "plan").close()
    header = json.loads(path.read_text())
    assert header["plan_file"] == hashlib.sha256(b"rounds = 2\n").hexdigest()
    Ledger(events, path, "plan").close()
    (tmp_path / "plan.toml").write_text("rounds = 2 \n")
    with pytest.raises(LedgerError, match=r"plan\.toml was edited"):
        Ledger(events, path, "plan")
    (tmp_path / "plan.toml").unlink()
    with pytest.raises(LedgerError, match=r"plan\.toml was edited"):
        Ledger(events, path, "plan")


def test_a_ledger_of_before_plans_were_hashed_is_gone_on_with(tmp_path):
    path, events = tmp_path / "ledger.jsonl", [Gaussian(2.0)] * 2
    Ledger(events, path, "plan").close()
    assert "plan_file" not in json.loads(path.read_text())
    (tmp_path / "plan.toml").write_text("rounds = 2\n")
    with Ledger(events, path, "plan") as ledger:
        ledger.charge(0)
    with pytest.raises(LedgerError):
        Ledger(events, path, "other")


BUDGETS = {
    "not a number": ("epsilon = 2.0", "epsilon = nan"),
    "none": ("epsilon = 2.0\n", ""),
    "two": ("epsilon = 2.0", "epsilon = 2.0\nnoise_multiplier = 3.0"),
    "a string": ("epsilon = 2.0", 'epsilon = "2.0"'),
    "negative": ("epsilon = 2.0", "epsilon = -2.0"),
    "noise as a string": ("epsilon = 2.0", 'noise_multiplier = "3"'),
    "an unknown shape": ('kind = "even"', 'kind = "surprise"'),
    "another shape": ('kind = "even"', 'kind = "power"\nalpha = 0.4'),
    "weights as strings": ("budget = []", 'budget = ["a", "b", "c"]'),
    "too few weights": ("budget = []", "budget = [1.0]"),
    "a larger budget": ("epsilon = 2.0", "epsilon = 3.0"),
    "another noise": ('kind = "gaussian"', 'kind = "laplace"'),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_that_is_none_or_another_is_found(run, name):
    replan(run, BUDGETS[name])
    store_wholly(run, certificate(run))
    assert failed(run)[0] == "budget"


@pytest.mark.parametrize("rounds", [2, 1])
def test_noise_of_a_recipe_for_rows_is_computed_anew(tmp_path, rounds):
    method = registered()["dpaggr"](rows=8)
    assert method.clipping(1, 1).rows == 8
    run = run_into(tmp_path / "run", method, rounds=rounds)
    told = certificate(run)
    assert failed(run) == [] and told["epsilon"] < 1.9
    told["events"][0]["noise_multiplier"] *= 1.01
    recounted(told)
    store_wholly(run, told)
    assert "budget" in failed(run)


PIECES = {
    "before": lambda content: b"rows of client 7" + content,
    "behind": lambda content: content + b"rows of client 7",
    "a comment": lambda content: content[:-2] + b"\x04\0rows",
}


@pytest.mark.parametrize("file", ["posts.npz", "shared.npz"])
@pytest.mark.parametrize("place", PIECES)
def test_bytes_that_belong_to_no_post_are_found(run, place, file):
    (run / file).write_bytes(PIECES[place]((run / file).read_bytes()))
    store_wholly(run, certificate(run))
    assert ("releases" if file == "posts.npz" else "public files") in failed(run)


def test_bytes_between_posts_are_found(run):
    with zipfile.ZipFile(run / "posts.npz") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with (run / "posts.npz").open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
            file.write(b"rows")
            archive.start_dir = file.tell()
    with np.load(run / "posts.npz") as posts:
        assert len(posts.files) == len(entries)  # numpy sees nothing
    store_wholly(run, certificate(run))
    assert "releases" in failed(run)


def test_a_header_of_numbers_that_says_more_is_found(run):
    def padded(entries):
        name = "000000.weight.npy"
        content = entries[name]
        return {**entries, name: content.replace(b", }   ", b", }#hi", 1)}

    repacked(run, padded)
    with np.load(run / "posts.npz") as posts:
        assert posts["000000.weight"].size  # numpy reads it
    store_wholly(run, certificate(run))
    assert "releases" in failed(run)


def flagged(content):
    """Return the archive with all members marked as encrypted."""
    return marked(content, 6, 8, lambda byte: byte | 1)


def squeezed(content):
    """Return the archive with an unknown compression method."""
    return marked(content, 8, 10, lambda byte: 99)


def marked(content, local, central, change):
    content = bytearray(content)
    for mark, place in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = -1
        while (at := content.find(mark, at + 1)) >= 0:
            content[at + place] = change(content[at + place])
    return bytes(content)


@pytest.mark.parametrize("change", [flagged, squeezed])
def test_posts_that_cannot_be_read_are_a_failure(run, change):
    (run / "posts.npz").write_bytes(change((run / "posts.npz").read_bytes()))
    store_wholly(run, certificate(run))
    assert "releases" in failed(run)


@pytest.mark.parametrize(
    "line",
    ["garbage", "rows of client 7", "[" * 100_000, '{"charge": 1, "x', '{"charge":2}', "\ufeff"],
    ids=range(6),
)
def test_a_line_that_no_crash_leaves_is_found(run, line):
    rewrite(run, lambda lines: lines.append(line))
    store_skilfully(run, certificate(run))
    assert "ledger" in failed(run)


@pytest.mark.parametrize("kind", [1, 2])
def test_any_cut_of_a_line_is_counted_and_forgiven(run, kind):
    whole = (run / "ledger.jsonl").read_text().splitlines()
    for length in range(1, len(whole[kind])):
        cut = [whole[0], whole[1], whole[kind][:length], *whole[2:]]
        (run / "ledger.jsonl").write_text("".join(f"{line}\n" for line in cut))
        found = read_ledger(run)
        assert (found.void, found.faults) == (1, []), cut[2]
    store_skilfully(run, certificate(run))
    checks = {check.name: check for check in verify(run).checks}
    assert checks["ledger"].status == "ok" and "1 cut off by a crash" in checks["ledger"].found


def test_a_ledger_that_does_not_end_is_found(run):
    with (run / "ledger.jsonl").open("a") as file:
        file.write('{"charge": 3}')
    store_skilfully(run, certificate(run))
    assert "ledger" in failed(run)


PRIVATE = {
    "names that are lists": ("models/clients.json", b"[[1]]"),
    "names that are a number": ("models/clients.json", b"3"),
    "a header that is a list": ("models/clients.safetensors", b"\x02" + b"\0" * 7 + b"[]"),
    "a shape that is none": (
        "models/clients.safetensors",
        b"\x15" + b"\0" * 7 + b'{"a":{"shape":[[1]]}}',
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_files_that_are_anything_are_a_failure(run, name):
    path, content = PRIVATE[name]
    (run / path).write_bytes(content)
    assert failed(run) == ["clients"]


def test_models_without_names_are_found(run):
    (run / "models/clients.json").unlink()
    assert failed(run) == ["clients"]


@pytest.mark.parametrize("line", ['cohort = "a"', "cohort = nan", "cohort = 1e400"])
def test_a_sampler_that_is_none_is_found(run, line):
    replan(run, ("[sampler]", f"[sampler]\n{line}"))
    store_wholly(run, certificate(run))
    assert failed(run)[0] == "plan"


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_a_certificate_holds_there_is_a_verdict(healthy, tmp_path_factory, data):
    """Any value of it may be anything: it is found, and never a crash."""
    run = tmp_path_factory.mktemp("any") / "run"
    # With the models: without them the number of clients cannot be checked, and verify says so.
    shutil.copytree(healthy, run, ignore=shutil.ignore_patterns("log.jsonl"))
    told = certificate(run)
    anything = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
        st.just(10**400), st.just([]), st.just({}), st.just([[1]]), st.just({"a": [1]}),
    )  # fmt: skip
    paths = [path for path in places_in(told) if path[0] not in FREE]
    path = data.draw(st.sampled_from(paths))
    value = data.draw(anything)
    other = changed(told, path, lambda _: value)
    store_skilfully(run, other) if isinstance(other.get("files"), dict) else store(run, other)
    with suppress(UnreadableError):
        # A whole number may be written as 1 or as 1.0.
        before = reduce(getitem, path, told)
        same = value == before and isinstance(value, bool) == isinstance(before, bool)
        assert not verify(run).verified or other == told or same, path
    shutil.rmtree(run)


FREE = ("versions", "started", "finished", "assumed_public")
"""Fields that nothing in the folder is bound to."""


def places_in(value, path=()):
    """Return the paths of everything in a certificate."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts if isinstance(value, dict | list) else ():
        yield (*path, key)
        yield from places_in(part, (*path, key)) if isinstance(part, dict | list) else ()


def test_what_is_not_checked_is_said(healthy, capsys):
    assert main(["verify", str(healthy)]) == 0
    assert "shared.npz" in capsys.readouterr().out
    assert main(["verify", str(healthy), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert any("shared.npz" in limit for limit in found["not_checked"])


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
    assert line.startswith("FAILED")
    assert float(line.rpartition("recomputed ")[2]) == pytest.approx(2.0, rel=1e-6)


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


@pytest.mark.parametrize("gone", ["guarantee.json", "guarantee.json and plan.toml", "all"])
def test_a_run_without_a_certificate_among_others_fails(healthy, tmp_path, capsys, gone):
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        shutil.copytree(healthy, runs / name)
    (runs / "members.json").write_text(json.dumps({"one": {}, "two": {}}))
    assert main(["verify", str(runs)]) == 0
    if gone == "all":
        shutil.rmtree(runs / "two")
    else:
        for name in gone.split(" and "):
            (runs / "two" / name).unlink()
    capsys.readouterr()
    assert main(["verify", str(runs), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [one["verified"] for one in found] == [True, False]
    assert "no guarantee.json" in found[1]["checks"][0]["found"]


def test_a_certificate_that_cannot_be_read_among_others_fails(healthy, tmp_path, capsys):
    for name in ("one", "two"):
        shutil.copytree(healthy, tmp_path / "runs" / name)
    (tmp_path / "runs" / "one" / "guarantee.json").write_text("[" * 200_000)
    assert main(["verify", str(tmp_path / "runs")]) == 1
    out = capsys.readouterr().out
    assert "one: NOT VERIFIED" in out and "two: verified" in out


UNREADABLE = {
    "no folder": lambda run, told: shutil.rmtree(run),
    "unfinished": lambda run, told: (run / "guarantee.json").unlink(),
    "no JSON": lambda run, told: (run / "guarantee.json").write_text("{"),
    "too deep": lambda run, told: (run / "guarantee.json").write_text("[" * 200_000),
    "no format": lambda run, told: store(run, {**told, "format": None}),
    "format 1": lambda run, told: store(run, {**told, "format_version": 1}),
    "later": lambda run, told: store(run, {**told, "format_version": 3}),
    "true": lambda run, told: store(run, {**told, "format_version": True}),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_what_cannot_be_read_exits_2(run, capsys, damage):
    UNREADABLE[damage](run, certificate(run))
    assert main(["verify", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("coterie verify: ") and err.count("\n") == 1
    assert "expected 2" in err or "format_version" not in err


def test_a_folder_without_a_run_exits_2(tmp_path):
    assert main(["verify", str(tmp_path)]) == 2


def test_checking_changes_nothing(healthy):
    before = {path: path.stat().st_mtime_ns for path in healthy.rglob("*")}
    verify(healthy)
    assert {path: path.stat().st_mtime_ns for path in healthy.rglob("*")} == before


def test_checking_loads_nothing_of_training(healthy):
    """Nor torch; and dp-accounting only where no closed form exists."""
    code = (
        "import sys; from coterie.verification import verify; "
        f"assert verify({str(healthy)!r}).verified; "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in "
        "('coterie', 'torch', 'dp_accounting', 'numba', 'pyarrow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if not name.startswith("coterie.verification")} == {"coterie"}


def test_both_numbers_of_a_check_are_written_to_the_same_digits():
    near = Span(0.999999989, 0.99999999)
    (check,) = _compared("epsilon", {"epsilon": 0.9999999890286034}, lambda: {"epsilon": near})
    assert check.found == "stated 1, recomputed 1"
    (check,) = _compared("epsilon", {"epsilon": 0.9}, lambda: {"epsilon": Span(1.0, 1.0)})
    assert check.status == "FAILED" and check.found == "stated 0.9, recomputed 1"
    (check,) = _compared("epsilon", {"epsilon": "none"}, lambda: {"epsilon": Span(1.0, 1.0)})
    assert check.found == "stated none, recomputed 1"


@pytest.mark.parametrize("change", [-40, 1])
def test_models_cut_short_or_with_bytes_behind_are_found(run, change):
    path = run / "models" / "clients.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    assert failed(run) == ["clients"]
