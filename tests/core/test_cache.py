"""What is made once per user: where it lies, who may write there, and damage."""

import os
import subprocess
import sys
import textwrap

import pytest

from coterie.core import cache
from coterie.core.cache import folder, kept, usual_folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Use a cache of its own."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    folder.cache_clear()
    yield tmp_path / "cache"
    folder.cache_clear()


def test_the_folder_is_that_of_the_setting_then_of_the_user(place, monkeypatch, tmp_path):
    assert folder() == place and place.is_dir()
    monkeypatch.delenv("COTERIE_CACHE")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert usual_folder() == tmp_path / "coterie"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: to be ignored
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usual_folder() == tmp_path / ".cache" / "coterie"


def test_a_folder_that_others_may_write_to_is_not_used(place):
    place.mkdir()
    place.chmod(0o777)
    assert folder() is None
    assert kept("script", lambda: b"made") == b"made"
    assert list(place.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_used(place, monkeypatch):
    monkeypatch.setattr(cache.os, "geteuid", lambda: os.getuid() + 1)
    assert folder() is None


def test_content_is_made_once_and_again_if_damaged(place):
    made = []

    def make():
        made.append(1)
        return b"a script\n" * 1000

    assert kept("script", make) == kept("script", make) == b"a script\n" * 1000
    assert len(made) == 1
    path = place / "script"
    path.write_bytes(path.read_bytes()[:-1])  # cut short
    assert kept("script", make) == b"a script\n" * 1000 and len(made) == 2
    path.write_bytes(path.read_bytes().replace(b"a script", b"a SCRIPT"))
    assert kept("script", make) == b"a script\n" * 1000 and len(made) == 3


KERNEL = """
from coterie.core.kernels import compiled, linked

@linked(error_model="numpy")
def add(x, y):
    return x + y

@compiled(error_model="numpy")
def double(x):
    return add(x, x)
"""
CALLS = """
import sys
sys.path.insert(0, sys.argv[1])
import kernel
double = kernel.double
assert double(2) == 4 and double(1.5) == 3.0
print(sum(double.stats.cache_hits.values()), sum(double.stats.cache_misses.values()))
"""


def call(source, **environment):
    """Call the kernel of a folder in a process of its own; return cache hits and misses."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CALLS), str(source)],
        env={**os.environ, "NUMBA_CACHE_DIR": "", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return tuple(map(int, done.stdout.split()))


@pytest.mark.full
def test_installations_share_compiled_kernels_by_their_text(tmp_path):
    places = [tmp_path / name for name in ("one", "two", "other")]
    for one in places:
        one.mkdir()
        (one / "kernel.py").write_text(KERNEL + ("# changed\n" if one.name == "other" else ""))
    places[1].chmod(0o555)  # as site-packages of an administrator
    mine = {"COTERIE_CACHE": str(tmp_path / "cache")}
    assert call(places[0], **mine) == (0, 2)
    assert call(places[1], **mine) == (2, 0)
    assert call(places[2], **mine) == (0, 2)  # another text


@pytest.mark.full
def test_without_a_writable_home_kernels_still_compile(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    shut = tmp_path / "file"
    shut.touch()
    assert call(tmp_path, COTERIE_CACHE=str(shut / "cache")) == (0, 2)


@pytest.mark.full
def test_with_another_numba_kernels_compile_as_usual(tmp_path):
    other = "from coterie.core import kernels\nkernels._LINKING = 'another'\n"
    (tmp_path / "kernel.py").write_text(other + KERNEL)
    assert call(tmp_path, COTERIE_CACHE=str(tmp_path / "cache")) == (0, 2)
    assert call(tmp_path, COTERIE_CACHE=str(tmp_path / "cache")) == (2, 0)
