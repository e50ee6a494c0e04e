"""A lighter start of Flower's ClientApp process, of which every message starts one.

The package of `flwr-clientapp` also loads what only the SuperNode itself needs: a database, its
migrations. That is half of the time that such a process takes before it begins. A file
`flwr-clientapp` that stands earlier on the search path of a SuperNode puts an empty module in its
place, and then calls Flower's own program. In a version of Flower that is arranged differently the
empty module is never looked up, and the file does what Flower's does.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

_UNUSED = "flwr.supernode.cli.flower_supernode"
_NAME = "flwr-clientapp"
POLICY = "COTERIE_POLICY"
"""The environment variable that names the policy of a site (`coterie.flower.policy`)."""
_SCRIPT = """\
#!{python}
from coterie.deploy.starter import main

main()
"""


def program(name: str) -> Any:
    """Return a program of Flower as a function, by the entry point that its package declares."""
    try:
        points = distribution("flwr").entry_points
    except PackageNotFoundError:
        points = None
    found = [] if points is None else list(points.select(group="console_scripts", name=name))
    if not found:
        raise ValueError(f"{name} is not installed: pip install 'coterie[flower]'")
    return found[0].load()


def write_starter(folder: Path) -> Path:
    """Write the starter into a folder, which is to stand first on the search path; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
    path.write_text(_SCRIPT.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o700)
    return folder


def light_path(folder: Path, path: str) -> str:
    """Return a search path on which the starter in a folder stands first."""
    return os.pathsep.join([str(write_starter(folder)), path])


def main() -> None:
    """Run Flower's ClientApp process."""
    unused = ModuleType(_UNUSED)
    unused.flower_supernode = None  # type: ignore[attr-defined]
    sys.modules[_UNUSED] = unused
    if (policy := os.environ.get(POLICY)) is not None:
        # By name: deployments of coterie's own apps never load it.
        import_module("coterie.flower.policy").enforce(Path(policy))
    program(_NAME)()
