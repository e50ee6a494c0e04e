"""A site's policy for any app: what leaves is clipped, noisy, counted, and nothing else."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from coterie.cli.main import main
from coterie.core.config import ConfigError
from coterie.flower import Policy, PolicyError

START = {"w": np.full((50, 40), 0.5, dtype=np.float32), "b": np.zeros((), dtype=np.float32)}


def policy(tmp_path, **changes):
    usual = {"clip": 2.0, "noise_multiplier": 20.0, "rounds": 3, "epsilon": 9.0}
    return Policy(**{**usual, "folder": str(tmp_path / "account"), **changes})


def message(arrays=START, kind="train", **more):
    content = {"arrays": ArrayRecord({n: _array(a) for n, a in arrays.items()}), **more}
    return SimpleNamespace(
        metadata=SimpleNamespace(message_type=kind),
        content=RecordDict(content),
        has_error=lambda: False,
    )


def _array(values):
    from flwr.app import Array

    return Array(np.asarray(values))


def answering(change, **more):
    def app(asked, context):
        arrays = {n: change(a.numpy()) for n, a in asked.content["arrays"].items()}
        return message(arrays, **more)

    return app


def sent(reply):
    return {name: array.numpy() for name, array in reply.content["arrays"].items()}


@pytest.mark.parametrize("far", [0.0, 1e-3, 1e6, np.nan])
def test_an_update_is_clipped_and_has_the_noise(tmp_path, far):
    reply = policy(tmp_path).apply(message(), None, answering(lambda a: a + a.dtype.type(far)))
    found = sent(reply)
    assert {n: (a.shape, a.dtype) for n, a in found.items()} == {
        n: (a.shape, a.dtype) for n, a in START.items()
    }
    update = (found["w"] - START["w"]).ravel() / 40
    # 2,000 numbers with deviation 1, around a mean of norm 1/20 at most
    assert stats.kstest(update, "norm").pvalue > 1e-6
    assert abs(update.mean()) * math.sqrt(update.size) < 6


def test_the_clip_binds(tmp_path):
    """With hardly any noise the update has the norm of the clip."""
    kind = policy(tmp_path, noise_multiplier=1e-3, epsilon=1e9)
    found = sent(kind.apply(message(), None, answering(lambda a: a + a.dtype.type(7))))
    moved = np.concatenate([(found[n] - START[n]).ravel() for n in START])
    assert np.linalg.norm(moved) == pytest.approx(2.0, rel=0.01)


def test_nothing_else_leaves(tmp_path):
    more = {
        "metrics": MetricRecord({"num-examples": 4711, "loss": 0.25}),
        "extra": ConfigRecord({"rows": "4711"}),
    }
    reply = policy(tmp_path).apply(message(), None, answering(lambda a: a, **more))
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content["metrics"]) == {"num-examples": 1}


def test_no_name_is_of_the_apps_choice(tmp_path):
    """A name could hold what rows say; a strategy that expects another one is named by the site."""
    app = answering(lambda a: a, **{"rows 4711": MetricRecord({"num-examples": 1})})
    assert set(policy(tmp_path).apply(message(), None, app).content) == {"arrays", "metrics"}
    named = policy(tmp_path, metrics="scores").apply(message(), None, app)
    assert set(named.content) == {"arrays", "scores"}


def test_rounds_and_epsilon_are_limits_over_all_processes(tmp_path, capsys):
    app = answering(lambda a: a)
    for _ in range(3):  # each as in a process of its own
        policy(tmp_path).apply(message(), None, app)
    with pytest.raises(PolicyError, match="answers 3 training messages"):
        policy(tmp_path).apply(message(), None, app)
    with pytest.raises(PolicyError, match="epsilon"):
        policy(tmp_path, rounds=99, epsilon=0.2).apply(message(), None, app)
    assert main(["verify", str(tmp_path / "account")]) == 0
    assert policy(tmp_path).account().num_releases == 3


def test_an_answer_is_charged_before_it_is_computed_and_errors_say_nothing(tmp_path):
    def fails(asked, context):
        assert policy(tmp_path).account().num_releases == 1
        raise ValueError("row 7 holds 4711")

    with pytest.raises(PolicyError, match=_FAILED) as caught:
        policy(tmp_path).apply(message(), None, fails)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert policy(tmp_path).account().num_releases == 1
    log = tmp_path / "account" / "errors.log"
    assert log.read_text() == "ValueError: row 7 holds 4711\n"
    assert log.stat().st_mode & 0o077 == 0


_FAILED = r"^the app failed; why is in errors\.log of the site$"


@pytest.mark.parametrize(
    "answer",
    [
        {"w": np.array([["row 7 holds 4711"] * 40] * 50), "b": START["b"]},
        {"w": START["w"][:7], "b": START["b"]},
        {"row 7": START["w"]},
    ],
)
def test_an_answer_that_cannot_be_protected_says_nothing_either(tmp_path, answer):
    with pytest.raises(PolicyError, match=_FAILED) as caught:
        policy(tmp_path).apply(message(), None, lambda asked, context: message(answer))
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.mark.parametrize(
    "asked, app, text",
    [
        (message(kind="evaluate"), answering(lambda a: a), "training messages only"),
        (message(kind="query"), answering(lambda a: a), "training messages only"),
        (message(more=ArrayRecord({})), answering(lambda a: a), "2 records of arrays"),
    ],
)
def test_what_is_not_permitted_is_refused(tmp_path, asked, app, text):
    with pytest.raises(PolicyError, match=text):
        policy(tmp_path).apply(asked, None, app)


def test_a_policy_is_checked_when_it_is_read(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('clip = 1.0\nnoise_multiplier = 0.0\nrounds = 3\nepsilon = 1.0\nfolder = "a"\n')
    with pytest.raises((ConfigError, ValueError), match="noise_multiplier"):
        Policy.load(path)
    assert main(["deploy", "supernode", "--policy", str(path)]) == 2
    path.write_text("clip = 1.0\nrows = 3\n")
    with pytest.raises(ConfigError, match="rows"):
        Policy.load(path)


ENFORCED = """
import sys
from pathlib import Path
from coterie.flower.policy import enforce
enforce(Path(sys.argv[1]))
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    raise AssertionError("it was asked")

from types import SimpleNamespace
asked = SimpleNamespace(metadata=SimpleNamespace(message_type="evaluate"))
try:
    app(asked, None)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_every_client_app_of_a_process_is_under_the_policy(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(
        f'clip = 1.0\nnoise_multiplier = 9.0\nrounds = 3\nepsilon = 1.0\nfolder = "{tmp_path}/a"\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", ENFORCED, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("PolicyError this site answers training"), done.stderr


def test_the_command_becomes_flowers_program(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "coterie", "deploy", "supernode", "--", "--help"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "SuperNode" in done.stdout
