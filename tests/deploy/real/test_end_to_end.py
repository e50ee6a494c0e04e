"""The whole path over real processes: SuperLink, SuperNodes, `flwr run`, a run folder, models.

One federation and one run for all checks. That an app which is submitted again goes on, or does
nothing, is held in test_faults.py and tests/deploy/test_results.py.
"""

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("flwr")

from tests.deploy.real.trials import (
    QUICK,
    Attempt,
    Trial,
    json_lines,
    packed,
    releases,
    same_models,
    site_models,
    write_trial,
)

from coterie.cli.main import main
from coterie.core.config import to_toml
from coterie.deploy import processes
from coterie.deploy.keys import load_private
from coterie.deploy.processes import LocalFederation
from coterie.deploy.superlink import SWITCHES
from coterie.privacy.sampling import Poisson

pytestmark = pytest.mark.full
SIZES = {"north": 269, "south": 268}
ROUNDS = 1
EAR = """
import os, sys

def hear(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        address = arguments[0 if event == "socket.getaddrinfo" else 1]
        line = f"{event} {address!r}\\n".encode()
        file = os.open(os.environ["HEARD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line)
        os.close(file)

sys.addaudithook(hear)
"""


@dataclass
class Observed:
    """What was seen from outside while the federation ran."""

    trial: Trial
    run: Path
    heard: Path
    status: list[str] = field(default_factory=list)
    flwr: subprocess.CompletedProcess[str] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    left: list[psutil.Process] = field(default_factory=list)
    seconds: float = 0.0


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Observed:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "ear").mkdir()
    (folder / "ear" / "sitecustomize.py").write_text(EAR)
    trial = write_trial(
        folder, "districts", SIZES, rounds=ROUNDS, sampler=Poisson(cohort=300), deadline=300.0
    )
    found = Observed(trial, folder / "run", folder / "heard.txt")
    path = os.pathsep.join([str(folder / "ear"), os.environ.get("PYTHONPATH", "")])
    hearing = {"PYTHONPATH": path.rstrip(os.pathsep), "HEARD": str(found.heard)}
    nodes = {site: trial.node(site, runs=1) for site in trial.sites}
    started = time.monotonic()
    with LocalFederation(
        folder / "flower", trial.keys, nodes, environment={**QUICK, **hearing}, patience=300
    ) as federation:
        over = threading.Event()
        watch = threading.Thread(target=_watch, args=(federation.tag, found, over))
        watch.start()
        try:
            _run(federation, found)
        finally:
            over.set()
            watch.join()
    found.left = processes.tagged(federation.tag)
    found.seconds = time.monotonic() - started
    return found


def _run(federation: LocalFederation, found: Observed) -> None:
    attempt = Attempt(found.trial, federation, found.run)
    config = f'folder="{found.run}" key="{found.trial.keys / "coordinator.key"}"'
    flwr = [str(Path(sys.executable).parent / "flwr"), "run", str(found.trial.app.folder), "local"]
    environment = federation.environment("cli")
    place = {"address": federation.address, "root-certificates": str(federation.keys / "ca.pem")}
    (Path(environment["FLWR_HOME"]) / "config.toml").write_text(
        to_toml({"superlink": {"default": "local", "local": place}})
    )
    found.flwr = subprocess.run(
        [*flwr, "--run-config", config, "--format", "json"],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.flwr.returncode == 0, found.flwr
    attempt.runs.append(int(re.search(r'"run-id": "?(\d+)', found.flwr.stdout)[1]))
    found.status.append(attempt.wait())
    assert found.status == ["finished:completed"], attempt.log()
    found.files = contents(found.run)


def _watch(tag: str, found: Observed, over: threading.Event) -> None:
    """Store the environment of every process that is seen."""
    while not over.wait(0.5):
        for process in processes.tagged(tag):
            with contextlib.suppress(psutil.Error):
                name = f"{process.pid} {' '.join(process.cmdline())}"
                found.environments[name] = process.environ()


def contents(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def check_the_run_completes_and_everything_is_stopped(shown: Observed) -> None:
    assert shown.status == ["finished:completed"]
    assert shown.left == []
    rounds = [line for line in json_lines(shown.run / "log.jsonl") if line["event"] == "round"]
    assert [line["answered"] for line in rounds] == [line["asked"] for line in rounds]
    assert len(rounds) == ROUNDS


def check_posts_are_those_of_the_simulation(shown: Observed) -> None:
    posts = releases(shown.run)
    assert len(posts) == ROUNDS
    assert posts == shown.trial.expected()
    with np.load(shown.run / "shared.npz") as shared:
        for name, leaf in shown.trial.simulated.shared.items():
            (found,) = [shared[key] for key in shared.files if key.endswith(name)]
            np.testing.assert_allclose(found, leaf.numpy(), rtol=1e-6)


def check_sites_have_the_models_of_the_simulation_and_the_coordinator_none(
    shown: Observed,
) -> None:
    assert same_models(shown.trial, shown.run)
    models = site_models(shown.trial, shown.run)
    assert all(len(rows) == sum(SIZES.values()) for rows in models.values())
    assert not [name for name in shown.files if "models" in name or "personal" in name]
    assert "metrics.parquet" not in shown.files


def check_the_run_folder_is_accepted_and_a_page_is_made_of_it(shown: Observed) -> None:
    assert main(["verify", str(shown.run)]) == 0
    page = shown.run.parent / "report.html"
    assert main(["report", str(shown.run), "--out", str(page)]) in (0, None)
    assert b"</html>" in page.read_bytes()


def _secrets(keys: Path) -> Iterator[tuple[str, bytes]]:
    """Return private keys in every form in which they could be written down."""
    for path in sorted(keys.rglob("*")):
        if path.is_file() and b"PRIVATE KEY" in path.read_bytes():
            for line in path.read_bytes().splitlines()[1:-1]:
                if len(line) >= 32 and not line.startswith(b"b3BlbnNzaC1rZXktdjE"):
                    yield f"a line of {path.name}", line
    for path in [keys / "coordinator.key", *keys.glob("sites/*/signing.key")]:
        seed = load_private(path).private_bytes_raw()
        yield f"the seed of {path}", seed
        yield f"the seed of {path} in hexadecimal", seed.hex().encode()
        yield f"the seed of {path} in base64", base64.b64encode(seed)[:-1]


def _rows(trial: Trial) -> Iterator[tuple[str, bytes]]:
    """Return some rows in every form: as numbers of two widths, and as text."""
    for row in (0, len(trial.data.targets) // 2, len(trial.data.targets) - 1):
        numbers = np.asarray(trial.data.features[row])
        own = [float(x) for x in numbers if len(f"{float(x):.6g}".strip("-0.")) >= 6]
        assert len(own) >= 2, "a row without numbers that stand out"
        yield "a row in single precision", numbers.astype("<f4").tobytes()
        yield "a row in double precision", numbers.astype("<f8").tobytes()
        for x in own:
            yield "a number of a row as text", f"{abs(x):.6g}".encode()[:-1]


def _written(shown: Observed) -> Iterator[tuple[str, bytes]]:
    """Return all that was written, archives unpacked, but for keys and the sites' own rows."""
    base = shown.trial.folder
    for path in sorted(base.rglob("*")):
        inner = path.relative_to(base)
        if not path.is_file() or path.is_relative_to(shown.trial.keys):
            continue
        if path.suffix == ".parquet" or inner.parts[0] in ("simulated", "function-calls"):
            continue
        content = path.read_bytes()
        yield str(inner), content
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for name in archive.namelist():
                    yield f"{inner}:{name}", archive.read(name)
    with zipfile.ZipFile(io.BytesIO(packed(shown.trial.app.folder))) as archive:
        for name in archive.namelist():
            yield f"the packed app: {name}", archive.read(name)


def check_no_key_and_no_row_is_anywhere_but_at_home(shown: Observed) -> None:
    """Also in what Flower keeps, in every log, and in what travels."""
    written = dict(_written(shown))
    assert any(name.startswith("flower/logs/") for name in written)
    assert any(name.endswith("worker.log") for name in written)
    assert any(name.startswith("the packed app") for name in written)
    secrets = [*_secrets(shown.trial.keys), *_rows(shown.trial)]
    assert len(secrets) > 20
    found = [
        (what, name) for what, secret in secrets for name in written if secret in written[name]
    ]
    assert found == []


def check_the_scan_would_find_what_it_looks_for(shown: Observed) -> None:
    """The sites' own files hold what the scan looks for: keys in `keys`, numbers in rows."""
    kept = b"".join(path.read_bytes() for path in shown.trial.keys.rglob("*") if path.is_file())
    lines = [secret for what, secret in _secrets(shown.trial.keys) if what.startswith("a line")]
    assert lines
    assert all(line in kept for line in lines)
    rows = np.asarray(shown.trial.data.features).astype("<f4").tobytes()
    singles = [row for what, row in _rows(shown.trial) if "single" in what]
    assert singles
    assert all(row in rows for row in singles)


def check_the_certificate_names_no_key_and_no_seed(shown: Observed) -> None:
    certificate = json.loads((shown.run / "guarantee.json").read_text())
    text = json.dumps(certificate)
    assert "PRIVATE" not in text
    assert str(shown.trial.keys) not in text
    assert "coordinator.key" not in text


def check_telemetry_and_update_checks_are_off_in_every_process(shown: Observed) -> None:
    seen = " ".join(shown.environments)
    for word in ("superlink", "flower-supernode", "flwr-serverapp", "deploy.worker"):
        assert word in seen, f"no process of {word} was seen"
    for words, said in shown.environments.items():
        assert {name: said.get(name) for name in SWITCHES} == SWITCHES, words


def check_no_process_tries_to_reach_another_machine(shown: Observed) -> None:
    """Every process of Python is heard; that the SuperLink is reached shows that this works."""
    lines = set(shown.heard.read_text().splitlines())
    assert any(line.startswith("socket.connect ('127.0.0.1'") for line in lines)
    assert any(".sock" in line for line in lines), "no worker was reached"
    near = re.compile(r"""\S+ (\(?b?'(127\.0\.0\.1|localhost|::1)'|'/|None)""")
    assert [line for line in lines if not near.match(line)] == []


CHECKS = (
    check_the_run_completes_and_everything_is_stopped,
    check_posts_are_those_of_the_simulation,
    check_sites_have_the_models_of_the_simulation_and_the_coordinator_none,
    check_the_run_folder_is_accepted_and_a_page_is_made_of_it,
    check_no_key_and_no_row_is_anywhere_but_at_home,
    check_the_scan_would_find_what_it_looks_for,
    check_the_certificate_names_no_key_and_no_seed,
    check_telemetry_and_update_checks_are_off_in_every_process,
    check_no_process_tries_to_reach_another_machine,
)


def test_a_plan_runs_over_flower_as_it_does_in_simulation(shown, subtests):
    """One test: several could be dealt to several workers, each with a federation of its own."""
    for check in CHECKS:
        with subtests.test(check.__name__):
            check(shown)
