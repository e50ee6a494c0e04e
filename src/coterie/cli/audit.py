"""`coterie audit`: try to break the guarantee of a plan, and report how far an attack gets."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.options import JSON, NO_DATA, SET, Commands, add_flags, add_plan, check_flags
from coterie.cli.options import command as new_command

if TYPE_CHECKING:
    from coterie.audit.empirical import Audit

_MORE = """\
Runs the plan many times on a few clients of the data, without and with a canary client whose rows
push its contribution to the clip. The adversary of the guarantee (all other clients together) sees
every release and guesses which of the two it was. Its success is a lower bound on epsilon. A bound
above the claim disproves the guarantee; one below it proves nothing, but a tight one (over half of
the claim) shows that noise, clip and account fit together. Give a plan, a run folder, or flags.

Two estimators: gaussian (scores of Gaussian releases are normal: tight) and threshold
(Clopper-Pearson intervals of one threshold's rates: no assumption, needs many trials). The same two
with the suffix _repeated_noise compare consecutive releases, in which noise used twice cancels.

Exit status: 0 if no lower bound is above the claim, 1 if one is, 2 on bad input.

--json prints one object: claimed, lower_bound, estimator, bounds (estimator, lower_bound,
confidence, and its details), holds, delta, relation, view, method, rounds, trials, seconds, canary
(pattern, scale, rows, mu)."""


def add(commands: Commands) -> None:
    """Add `audit`."""
    parser = new_command(
        commands,
        "audit",
        "attack a plan's guarantee: an empirical lower bound on epsilon beside the claim",
        "coterie audit --data districts --method pmtl --epsilon 4 --rounds 3 --trials 1000",
        _MORE,
        action=_audit,
    )
    parser.add_argument("run", nargs="?", metavar="PLAN|RUN", help="a TOML plan, or a run folder")
    add_flags(add_plan(parser), {"--epsilon NUMBER:float": "the claim to audit (default 1)"})
    flags = {
        "--trials N:int": "runs in each of the two worlds (default 1000)",
        "--confidence NUMBER:float": "that all bounds hold together (default 0.95)",
        "--seed N:int": "of the audit (default 0)",
        "--quiet": "no progress on stderr",
    }
    add_flags(parser.add_argument_group("audit"), flags | SET | JSON)


def _audit(arguments: argparse.Namespace) -> int:
    if arguments.run is not None:
        given = Path(arguments.run)
        arguments.plan = str(given / "plan.toml" if given.is_dir() else given)
    check_flags(arguments)
    if not (arguments.data or arguments.plan or arguments.set):
        raise ValueError(NO_DATA)
    confidence = 0.95 if arguments.confidence is None else arguments.confidence
    if not 0.5 <= confidence < 1:
        raise ValueError(f"--confidence {confidence}: expected a number from 0.5 to below 1")
    if arguments.epsilon is None and arguments.noise_multiplier is None and not arguments.plan:
        arguments.epsilon = 1.0
    from coterie.audit.empirical import audit
    from coterie.cli.flags import plan_table
    from coterie.plan.plan import Plan

    plan = Plan.from_table(plan_table(arguments))
    shown = sys.stderr.isatty() and not arguments.quiet
    found = audit(
        plan,
        plan.data.split()[0],
        trials=1000 if arguments.trials is None else arguments.trials,
        confidence=confidence,
        seed=arguments.seed or 0,
        progress=_print_progress if shown else lambda done, of: None,
    )
    print(json.dumps(found.to_json(), allow_nan=False) if arguments.json else _text(found))
    return 0 if found.holds else 1


def _print_progress(done: int, of: int) -> None:
    if done % max(1, of // 100) == 0 or done == of:
        print(f"\r{done} of {of} trials", end="\n" if done == of else "", file=sys.stderr)


def _text(found: "Audit") -> str:
    """Return the result as lines for a terminal."""
    canary = found.canary
    lines = [
        f"{found.method}, {found.rounds} rounds: claimed epsilon {found.claimed:.4g} at delta "
        f"{found.delta:.3g}, relation {found.relation}, against {found.view}",
        f"canary: {canary['rows']} rows, {canary['pattern']}, scale {canary['scale']:g}, "
        f"mu {canary['mu']:.4g}",
    ]
    for bound in found.bounds:
        lines.append(f"  lower bound {bound.epsilon:8.4g}  by {bound.estimator}")
    verdict = (
        "No lower bound is above the claim."
        if found.holds
        else "A LOWER BOUND IS ABOVE THE CLAIM: the guarantee does not hold."
    )
    level = f"{100 * found.best.confidence:g} %"
    lines.append(
        f"{verdict} {found.trials} trials in each world, all bounds together hold with confidence "
        f"{level}, {found.seconds:.0f} s."
    )
    return "\n".join(lines)
