"""Who signed what in a deployment: `signatures.json` in the coordinator's run folder, public.

- The *coordinator* signs the exact bytes of `guarantee.json`, with the key in `federation.toml`.
- Each *site* signs a statement when it has made its clients' models: the run, the hashes of
  `plan.toml` and `federation.toml` as the site itself writes them, and epsilon and delta as it
  computes them. It states that the site ran the agreed program under this plan, and nothing about
  rows or rounds. The coordinator cannot make it up, and cannot show another plan with it.

`coterie verify` checks all signatures with code of its own, and names who signed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.core.config import to_toml
from coterie.core.files import write_atomically
from coterie.deploy.federation import Agreement

FILE = "signatures.json"
FORMAT, FORMAT_VERSION = "coterie signatures", 1
_SITE, _COORDINATOR = b"coterie site statement v1\n", b"coterie certificate v1\n"
Statement = Mapping[str, str]
"""The text that a site signed, and the signature in hex."""


def make_statement(
    agreement: Agreement, run: str, site: str, key: Ed25519PrivateKey
) -> dict[str, str]:
    """Return a site's signed statement about a run."""
    text = json.dumps(_facts(agreement, run, site), sort_keys=True, allow_nan=False)
    return {"text": text, "signature": key.sign(_SITE + text.encode()).hex()}


def is_statement(found: Any, agreement: Agreement, run: str, site: str) -> bool:
    """Return whether a site signed this statement, about this run under this agreement."""
    if not isinstance(found, dict) or set(found) != {"text", "signature"}:
        return False
    try:
        key = agreement.federation.sites[site].public_key
        key.verify(bytes.fromhex(str(found["signature"])), _SITE + str(found["text"]).encode())
        return bool(json.loads(found["text"]) == _facts(agreement, run, site))
    except (InvalidSignature, ValueError, TypeError):
        return False


def write_signatures(
    folder: Path, key: Ed25519PrivateKey, statements: Mapping[str, Statement]
) -> None:
    """Write the coordinator's signature, and the sites' statements beside those already there."""
    path, known = folder / FILE, {}
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8")).get("sites", {})
    signature = key.sign(_COORDINATOR + (folder / "guarantee.json").read_bytes()).hex()
    found = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "coordinator": {"file": "guarantee.json", "signature": signature},
        "sites": {**known, **statements},
    }
    write_atomically(path, json.dumps(found, indent=2).encode())


def _facts(agreement: Agreement, run: str, site: str) -> dict[str, Any]:
    guarantee = agreement.guarantee
    plan = to_toml(agreement.plan.to_table()).encode()
    epsilon = guarantee.epsilon
    return {
        "run": run,
        "site": site,
        "plan.toml": hashlib.sha256(plan).hexdigest(),
        "federation.toml": hashlib.sha256(agreement.federation.to_toml().encode()).hexdigest(),
        "epsilon": "inf" if epsilon == float("inf") else epsilon,
        "delta": guarantee.delta,
    }
