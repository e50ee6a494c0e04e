"""`coterie doctor`: versions, devices, switches, and a self-test of noise and accounting."""

import argparse
from typing import Any

from coterie.cli.options import Commands, command

_NEEDED = ("coterie", "torch", "numpy", "scipy", "numba", "dp-accounting", "pyarrow", "safetensors")
_EXTRAS = {
    "report": ("altair", "vl-convert-python"),
    "sklearn": ("scikit-learn",),
    "tune": ("optuna",),
    "track": ("mlflow-skinny", "tensorboard"),
    "onnx": ("onnx", "onnxscript"),
    "hdf5": ("h5py",),
    "docs": ("mkdocs", "mkdocs-material", "mkdocstrings"),
}
_LITTLE = 1 << 30
"""Bytes of free disk below which a run folder may not fit."""
_MORE = """\
The self-test takes a few seconds, touches no data and keeps nothing. Noise is drawn anew each time:
a sound machine fails it with probability below 1e-6. The exit status is 1 if anything failed.

--json prints one object: passed, versions, extras (by name: what is missing, and what to install),
devices, folders, switches, checks (name, passed, told, seconds), seconds."""


def add(commands: Commands) -> None:
    """Add `doctor`."""
    parser = command(
        commands,
        "doctor",
        "versions, devices, and a self-test of noise and accounting in seconds",
        "coterie doctor",
        _MORE,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=doctor)


def doctor(arguments: argparse.Namespace) -> int:
    """Carry out `coterie doctor`."""
    import json
    import time
    from dataclasses import asdict

    started = time.perf_counter()
    found: dict[str, Any] = {
        "versions": _versions(),
        "extras": _extras(),
        "devices": _devices(),
        "folders": _folders(),
        "switches": _switches(),
    }
    if not arguments.json:
        print(_told(found))
    from coterie.cli.selftest import check_all

    checks = []
    for check in check_all():
        checks.append(check)
        if not arguments.json:
            mark = "ok  " if check.passed else "FAIL"
            print(f"  {mark}  {check.name:<22}  {check.told}", flush=True)
    passed = all(check.passed for check in checks) and not found["folders"]["problems"]
    seconds = time.perf_counter() - started
    if arguments.json:
        told = [asdict(check) for check in checks]
        print(json.dumps({"passed": passed, **found, "checks": told, "seconds": seconds}, indent=2))
    else:
        print(f"\n{_verdict(passed, found['folders']['problems'])} ({seconds:.1f} s)")
    return 0 if passed else 1


def _verdict(passed: bool, problems: list[str]) -> str:
    if passed:
        return "all is well"
    if problems:
        return f"not well: {'; '.join(problems)}"
    return "not well: do not run anything private here; report what failed"


def _versions() -> dict[str, str]:
    import platform

    return {"python": platform.python_version(), **{name: _version(name) or "" for name in _NEEDED}}


def _extras() -> dict[str, dict[str, Any]]:
    """Say of each extra what is installed, and what to install if not all is."""
    found: dict[str, dict[str, Any]] = {}
    for extra, packages in _EXTRAS.items():
        versions = {name: _version(name) for name in packages}
        whole = None not in versions.values()
        found[extra] = {
            "installed": whole,
            "versions": versions,
            "install": None if whole else f"pip install 'coterie[{extra}]'",
        }
    return found


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import os
    import platform

    import torch

    cuda = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": torch.get_num_threads(),
        "cuda": cuda,
    }


def _folders() -> dict[str, Any]:
    """Look at where solvers are kept once compiled, and at the disk of runs."""
    import shutil
    from pathlib import Path

    import numba

    from coterie import solvers
    from coterie.cli.selftest import writable

    given = str(getattr(numba.config, "CACHE_DIR", ""))
    cache = Path(given) if given else Path(str(solvers.__file__)).parent / "__pycache__"
    free, here = shutil.disk_usage(".").free, writable(Path())
    problems = [] if here else ["this folder cannot be written to: runs need --out elsewhere"]
    if here and free < _LITTLE:
        problems.append(f"{free / 1e9:.1f} GB are free on the disk of this folder: make room")
    told = {"numba_cache": str(cache), "numba_cache_writable": writable(cache)}
    return told | {"free_bytes": free, "writable": here, "problems": problems}


def _switches() -> dict[str, str | bool]:
    import os

    from coterie.core.environment import TELEMETRY_OFF, is_offline

    return {"offline": is_offline(), **{name: os.environ.get(name, "") for name in TELEMETRY_OFF}}


def _told(found: dict[str, Any]) -> str:
    """Say to a person what is here."""
    versions, devices, folders = found["versions"], found["devices"], found["folders"]
    cuda = ", ".join(devices["cuda"]) or "none"
    cache = "" if folders["numba_cache_writable"] else " (solvers are compiled anew in every run)"
    kept = "writable" if folders["numba_cache_writable"] else f"NOT writable{cache}"
    lines = [
        "versions   " + ", ".join(f"{name} {number}" for name, number in versions.items()),
        *(f"{'extras' if turn == 0 else '':<9}  {line}" for turn, line in enumerate(_lines(found))),
        f"devices    {devices['system']}, {devices['cores']} cores, {devices['threads']} threads, "
        f"CUDA: {cuda}",
        f"folders    compiled solvers: {kept}; {folders['free_bytes'] / 1e9:.1f} GB free here",
        f"switches   {_off(found['switches'])}",
        "",
        "self-test",
    ]
    return "\n".join(lines)


def _lines(found: dict[str, Any]) -> list[str]:
    whole = [name for name, extra in found["extras"].items() if extra["installed"]]
    missing = [extra["install"] for extra in found["extras"].values() if not extra["installed"]]
    return [", ".join(whole) or "none installed", *(f"missing: {line}" for line in missing)]


def _off(switches: dict[str, Any]) -> str:
    from coterie.core.environment import TELEMETRY_OFF

    changed = [name for name, value in TELEMETRY_OFF.items() if switches[name] != value]
    told = "telemetry of all dependencies off"
    if changed:
        told = f"telemetry NOT switched off by {', '.join(changed)}"
    return f"{told}; {'offline' if switches['offline'] else 'the network may be used'}"
