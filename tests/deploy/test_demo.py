"""The demo up to where processes start, and how its failures are said."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.cli.main import main
from coterie.deploy import demo
from coterie.deploy.processes import ControlError, FederationError

pytestmark = pytest.mark.full


class Stub:
    """Stands in for SuperLink and SuperNodes; keeps what it was given."""

    given: tuple = ()
    status = "finished:failed"
    lines: tuple = ()
    error: Exception | None = None

    def __init__(self, folder, keys, nodes, *, patience):
        type(self).given = (folder, keys, nodes)
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, *why):
        return None

    def submit(self, app, config):
        if self.error is not None:
            raise self.error
        run = Path(config["folder"])
        run.mkdir(parents=True)
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        type(self).submitted = (app, config)
        return 1

    def run_status(self, number):
        return self.status


@pytest.fixture
def stub(monkeypatch, tmp_path):
    made = type("Made", (Stub,), {})
    monkeypatch.setattr(demo, "LocalFederation", made)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_relative_folder_is_the_same_place_in_every_process(stub, tmp_path):
    with pytest.raises(FederationError):
        demo.run_demo(demo.Demo(folder=Path("here/demo"), rounds=2), lambda line: None)
    folder, keys, nodes = stub.given
    whole = tmp_path / "here" / "demo"
    paths = [folder, keys, *(one[name] for one in nodes.values() for name in ("key", "folder"))]
    paths += [one["data"] for one in nodes.values()]
    app, config = stub.submitted
    paths += [app, config["folder"], config["key"]]
    for path in paths:
        assert Path(path).is_relative_to(whole), path


def test_a_failure_is_one_line_that_quotes_the_log(stub, capsys):
    stub.lines = (
        {"time": "2026", "event": "round", "round": 1, "asked": 9, "answered": 9},
        {
            "time": "2026",
            "event": "failed",
            "kind": "IncompleteRoundError",
            "reason": "no site of 4",
        },
    )
    assert main(["deploy", "demo", "--out", "out"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("coterie deploy: the run ended as 'finished:failed' (no site of 4)")


def test_what_went_wrong_elsewhere_is_no_traceback(stub, capsys):
    stub.error = ControlError("the SuperLink cannot be reached")
    assert main(["deploy", "demo", "--out", "out"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("cannot be reached")


def test_a_fault_of_ours_still_is_one(stub):
    stub.error = RuntimeError("a fault")
    with pytest.raises(RuntimeError, match="a fault"):
        main(["deploy", "demo", "--out", "out"])


def test_a_run_that_does_not_begin_ends_with_a_cause(stub, capsys, monkeypatch):
    """As on a starved machine: Flower restarts the ServerApp again and again."""
    stub.status = "running"
    log = Path("out/flower/logs/superlink.log")

    def sleep(seconds):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write("Runtime task-token authentication failed\n")
        now[0] += 20 * seconds

    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(demo, "time", clock)
    assert main(["deploy", "demo", "--out", "out", "--limit", "130"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum("nothing for 60 s: the load of this machine" in line for line in lines) == 2
    assert (
        "did not end within the limit" in lines[-1] and "apps that Flower had given up" in lines[-1]
    )


@pytest.mark.parametrize("limit", ["0", "-1", "nan"])
def test_a_limit_is_a_time(stub, limit):
    assert main(["deploy", "demo", "--limit", limit]) == 2
