"""The certificate of a finished run, `guarantee.json`: all that others need to check the promise.

It holds the guarantee with every event in order, what each post must hash to, hashes of the public
files, versions, and in words what is promised and what is not. Nothing in it is a function of
clients' rows but the posts' hashes, which follow from the posts. `coterie verify` reads it with
code of its own.

`sha256` is the hash of all the rest, written as `sealed` does: it shows an edit by mistake or by an
unskilled hand. A skilled one can hash anew, and then has posts, ledger, plan and arithmetic to
agree with; whoever wants more signs the file.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.privacy.guarantee import Guarantee

FORMAT = "coterie certificate"
FORMAT_VERSION = 1
PUBLIC = ("plan.toml", "ledger.jsonl", "posts.npz", "shared.npz")
_UNCOVERED = (
    "metrics, losses, references and notices on clients' rows, which are shown without noise",
    "settings chosen by looking at results",
    "how long the run and its rounds took",
    "a personal model that its client gives away",
)


def certify(
    folder: Path,
    guarantee: Guarantee,
    posts: Mapping[int, str],
    *,
    begun: str,
    finished: str,
    versions: Mapping[str, str],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Make the certificate of a run whose public files lie in a folder.

    Args:
        folder: The run folder.
        guarantee: What is promised.
        posts: The digest of each released post, by index.
        begun: When the run began, UTC.
        finished: When it ended; both are told to the minute.
        versions: Of what it was computed with.
        more: What has to be read beside the guarantee.
    """
    stated = guarantee.to_json()
    stated["versions"] = dict(versions)
    certificate = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **stated,
        "statement": guarantee.statement(),
        **more,
        "not_covered": list(_UNCOVERED),
        "posts": [{"index": index, "sha256": posts[index]} for index in sorted(posts)],
        "files": {name: _hash(folder / name) for name in PUBLIC},
        "started": _minute(begun),
        "finished": _minute(finished),
    }
    return {**certificate, "sha256": sealed(certificate)}


def sealed(certificate: Mapping[str, Any]) -> str:
    """Hash a certificate but for its own hash: as JSON without spaces, keys in order."""
    rest = {key: value for key, value in certificate.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _minute(time: str) -> str:
    """Tell a time to the minute: to the second it would say more of the rows than it needs to."""
    return f"{time[:16]}Z"
