"""Dockerfile and compose file: linted, and their commands started as processes."""

import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from coterie.cli.main import main

pytest.importorskip("flwr")
yaml = pytest.importorskip("yaml")
PLACE = Path(__file__).parents[2] / "examples" / "containers"
SITES = ("north", "south", "east")
COMPOSE = yaml.safe_load((PLACE / "compose.yaml").read_text())


def instructions():
    text = (PLACE / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def test_the_image_runs_as_a_user_from_a_pinned_base_without_secrets():
    found = instructions()
    known = {"FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} <= known
    base = next(rest for name, rest in found if name == "FROM")
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base) and not base.endswith(":latest")
    order = [name for name, _ in found]
    assert order.index("RUN") < order.index("USER") < order.index("ENTRYPOINT")
    assert "root" not in next(rest for name, rest in found if name == "USER")
    copied = next(rest for name, rest in found if name == "COPY").split()[:-1]
    assert copied == ["dist/coterie-*.whl", "constraints.txt"]
    assert "--no-cache-dir" in next(rest for name, rest in found if name == "RUN")


def test_sites_see_their_own_keys_and_folder_only():
    services = COMPOSE["services"]
    assert set(services) == {"superlink", *SITES}
    mounted = []
    for site in SITES:
        one = services[site]
        assert one["read_only"] and one["cap_drop"] == ["ALL"] and one["restart"] == "always"
        keys, rows, own = one["volumes"]
        assert keys == f"./ward/keys/sites/{site}:/keys:ro" and rows.endswith(":ro")
        assert f'site="{site}"' in one["command"][-1] and "privileged" not in one
        mounted.append(own.split(":")[0])
    assert len(set(mounted)) == len(SITES)
    assert set(mounted) | {"coordinator"} == set(COMPOSE["volumes"])
    assert services["superlink"]["healthcheck"]["test"][0] == "CMD"
    assert "ports" not in services["superlink"]


def on_this_machine(service, app, folder, port):
    """A command of the compose file, with the paths and names of this machine."""
    one = COMPOSE["services"][service]
    places = {"/app": str(app), "/keys": f"{app}/keys/sites/{service}", "/srv/coterie": str(folder)}
    places |= {"superlink:9100": f"127.0.0.1:{port}", "0.0.0.0": "127.0.0.1"}

    def here(word):
        for inside, outside in places.items():
            word = re.sub(rf'(?<![\w/]){re.escape(inside)}(?=[/"]|$)', outside, word)
        return word.replace("--port=9100", f"--port={port}")

    words = [here(word) for word in one["command"]]
    return [sys.executable, "-m", "coterie", *words]


@pytest.mark.slow
def test_the_commands_start_a_superlink_and_a_supernode(tmp_path):
    from coterie.deploy.processes import Control, free_port

    app = tmp_path / "ward"
    (tmp_path / "plan.toml").write_text(
        'rounds = 2\n[data]\nname = "rows.csv"\n[data.source]\nclient = "c"\ntarget = "y"\n'
        '[method]\nkind = "pmtl"\n[privacy]\nepsilon = 2.0\n'
    )
    sites = [f"{site}={site}1,{site}2" for site in SITES]
    made = ["deploy", "init", str(app), "--plan", str(tmp_path / "plan.toml"), "--sites", *sites]
    assert main([*made, "--task", "regression", "--features", "3"]) == 0
    port = free_port()
    environment = {**os.environ, "FLWR_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    started = []

    def start(service, *more):
        path = tmp_path / f"{service}.log"
        command = [*on_this_machine(service, app, tmp_path, port), *more]
        facts = {"env": environment, "cwd": tmp_path, "start_new_session": True}
        with path.open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, **facts))
        return path

    def until(done, seconds=180):
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end and all(one.poll() is None for one in started)
            time.sleep(0.5)

    def healthy():
        trusted = ssl.create_default_context(cafile=str(app / "keys" / "ca.pem"))
        try:
            url = f"https://127.0.0.1:{port}/health"
            with urllib.request.urlopen(url, context=trusted, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        start("superlink")
        until(healthy)
        control = Control(f"127.0.0.1:{port}", app / "keys" / "ca.pem", tmp_path / "flwr")
        control.register(app / "keys" / "sites" / "north" / "supernode.pub", "north")
        log = start("north", "--port", str(free_port()))
        until(lambda: "SuperNode ID:" in log.read_text(errors="replace"))
    finally:
        for one in started:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait(20)
