"""What the coordinator's run folder holds when a run is done: posts, account, certificate.

The same files as those of a simulated run (`coterie.run`), less all that belongs to clients: their
models, their scores and their rows stay at the sites. So `coterie verify` and `coterie report` read
it like any other.
"""

from pathlib import Path
from typing import Any

from coterie.deployment.agreement import Agreement
from coterie.log import Log
from coterie.privacy.accounting import Guarantee
from coterie.privacy.billboard import Billboard
from coterie.summary import (
    TUNING,
    keep_certificate,
    keep_shared,
    keep_summary,
    promised,
)
from coterie.tree import Tree


def finish(
    folder: Path,
    agreement: Agreement,
    billboard: Billboard,
    shared: Tree,
    guarantee: Guarantee,
    log: Log,
    seconds: float,
) -> dict[str, Any]:
    """Write what a finished run leaves behind; result.json comes last."""
    plan, federation = agreement.plan, agreement.federation
    summary: dict[str, Any] = {
        "method": plan.method.title,
        "data": agreement.run_plan.data.name,
        "clients": federation.spec.clients,
        "task": federation.task,
        "rounds": plan.posts,
        **promised(guarantee),
        "metric": None,
        "value": None,
        "tuning": TUNING[agreement.run_plan.tuned],
        "caveats": [*plan.method.caveats(plan.posts > 0)],
        "notices": [],
        "deployment": {
            "trust": federation.trust,
            "sites": len(federation.sites),
        },
        "seconds": round(seconds, 3),
        "run": str(folder),
    }
    billboard.pack()
    log.note("packed")
    keep_shared(folder, shared)
    keep_certificate(folder, summary, guarantee, plan.method.kind, billboard.ledger.released, log)
    keep_summary(folder, summary)
    return summary
