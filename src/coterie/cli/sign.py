"""`coterie sign`: sign a finished run, so that others can check who stands for it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.options import Commands, check_file, command

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SIGNED = ("guarantee.json", "selection.json")

_MORE = """\
Checks the run as `coterie verify` does, and writes guarantee.sig: an Ed25519 signature of the exact
bytes of guarantee.json, which has the hashes of all public files. `coterie verify RUN --key
PUBLIC` checks it. Of a selection, selection.json and every run are signed.

--key takes a private key in PEM without a password, of --new-key or of `openssl genpkey -algorithm
ed25519`, or of OpenSSH. Give the public key (FILE.pub) to those who verify, by another way than the
run. Needs the extra `sign`.

Exit status: 0 if everything is signed, 1 if a run does not verify."""


def add(commands: Commands) -> None:
    """Add `sign`."""
    parser = command(
        commands,
        "sign",
        "sign a finished run",
        "coterie sign runs/exam-pmtl-20260101-120000 --key owner.key",
        _MORE,
        flags={
            "--key FILE": "the private key to sign with",
            "--new-key FILE": "make a key pair: FILE, which only you can read, and FILE.pub",
        },
        action=sign,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of one or more runs")


def sign(arguments: argparse.Namespace) -> int:
    """Carry out `coterie sign`."""
    new, key, runs = arguments.new_key, arguments.key, arguments.runs
    if (new is None) == (key is None) or bool(runs) == (key is None):
        raise ValueError(
            "expected RUN --key FILE to sign a run, or --new-key FILE to make a key pair"
        )
    try:
        from coterie.runs import signature
    except ImportError as error:
        raise ValueError(
            "signatures need the package cryptography, which is not installed; "
            "`pip install coterie[sign]` installs it"
        ) from error
    if new is not None:
        name = signature.new_key(check_file(Path(new), "--new-key"))
        print(f"key {name}: {new} (private), {new}.pub (public)")
        return 0
    return _sign(runs, signature.read_private(Path(key)))


def _sign(runs: Sequence[str], key: "Ed25519PrivateKey") -> int:
    """Sign the certificates of runs, and the records of selections, if all verify."""
    from coterie.cli.verify import judged, show
    from coterie.runs.signature import sign_file

    verdicts = [verdict for run in runs for verdict in judged(Path(run))]
    wrong = [verdict for verdict in verdicts if not verdict.verified]
    for verdict in wrong:
        show(verdict, whole=False)
    if wrong:
        print("nothing was signed")
        return 1
    places = [Path(verdict.folder) for verdict in verdicts]
    for path in (folder / name for folder in places for name in _SIGNED):
        if path.exists():
            print(sign_file(path, key))
    return 0
