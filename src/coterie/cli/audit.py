"""`coterie audit`: try to break the guarantee of a plan, and report how far an attack gets."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.deploy import need_flower
from coterie.cli.options import (
    JSON,
    NO_DATA,
    SET,
    SHARES,
    Commands,
    add_flags,
    add_plan,
    check_file,
    check_flags,
    check_shares,
)
from coterie.cli.options import command as new_command
from coterie.core.files import write_atomically

if TYPE_CHECKING:
    from coterie.audit.empirical import Audit
    from coterie.audit.reconstruction import Reconstructed, Setting
    from coterie.planning.plan import Plan

_PICTURES = (".svg", ".png", ".pdf")
_TITLES = {
    "trusted": "trusted server",
    "secure_aggregation": "secure aggregation",
    "client_noise": "noise of clients",
    "guess": "guess: the mean row",
}

_MORE = """\
Runs the plan many times on a few clients of the data, without and with a canary client whose rows
push its contribution to the clip. The adversary of the guarantee (all other clients together) sees
every release and guesses which of the two it was. Its success is a lower bound on epsilon. A bound
above the claim disproves the guarantee; one below it proves nothing, but a tight one (over half of
the claim) shows that noise, clip and account fit together. Give a plan, a run folder, or flags.

Two estimators: gaussian (scores of Gaussian releases are normal: tight) and threshold
(Clopper-Pearson intervals of one threshold's rates: no assumption, needs many trials). The same two
with the suffix _repeated_noise compare consecutive releases, in which noise used twice cancels.

--one-run needs a single run: many canaries take part by fair coins, and the adversary guesses the
coins (estimator one_run). It suits models with many parameters, in which canaries do not overlap.

Where clients add the noise, the server is the adversary and sees each message (--view server). With
noise on sums it is the other clients (--view clients); no epsilon is claimed against the server.
With noise in shares (--trust nobody) it is the coordinator with the corrupt clients: it knows every
share of the noise but those of K - C clients (view coordinator_and_corrupt).

--sites runs the clients through deployed sites, which answer signed requests in this process. With
--hostile their coordinator asks for each round again, with other requests; sites should refuse.

For a run folder the result is kept as audit.json, and `coterie report` shows it.

Exit status: 0 if no lower bound is above the claim, 1 if one is, 2 on bad input.

--attack reconstruction shows what a curious server could learn, for example
`coterie audit --data districts --method pmtl --epsilon 1 --attack reconstruction`.
It takes a client's contribution to the first round and reconstructs the client's rows (gradient
inversion; dual steps of all rounds for mtlsvm), in three settings: a trusted server sees each
clipped contribution, secure aggregation shows it only the sum of a cohort, and with noise of
clients it sees each contribution with noise.
The clients with the fewest rows are attacked; --rows 1 shows clients with one row. It tests no
claim, so the exit status is 0. --json then prints attack, method, model, epsilon, clients, rows,
rounds, closed_form, local_steps, settings (trusted, secure_aggregation, client_noise, and guess,
the mean row; each with error, found, best_cosine, mean_cosine, errors), left_out, seconds.

--json prints one object: claimed, lower_bound, estimator, bounds (estimator, lower_bound,
confidence, and its details), holds, delta, relation, view, method, rounds, trials, seconds, canary
(pattern, scale, rows, mu), errors (false positives and false negatives of the attack)."""


def add(commands: Commands) -> None:
    """Add `audit`."""
    parser = new_command(
        commands,
        "audit",
        "attack a plan's guarantee: an empirical lower bound on epsilon beside the claim",
        "coterie audit --data districts --method pmtl --epsilon 4 --rounds 3 --trials 1000",
        _MORE,
        usual="--data --client-column --target --method --epsilon --rounds --trials --attack "
        "--plot --json",
        action=_audit,
    )
    parser.add_argument("run", nargs="?", metavar="PLAN|RUN", help="a TOML plan, or a run folder")
    add_flags(add_plan(parser), {"--epsilon NUMBER:float": "the claim to audit (default 1)"})
    flags = {
        "--attack {canary,reconstruction}": "canary (default), or reconstruct rows of clients",
        "--trials N:int": "runs in each of the two worlds (default 1000); for reconstruction, "
        "clients to attack (default 5)",
        "--one-run": "a single run with many canaries, instead of trials",
        "--canaries N:int": "of one run (default: half of the clients, at most 500)",
        "--sites N:int": "run the clients through N deployed sites, in this process",
        "--hostile": "their coordinator asks for more than the protocol says",
        "--view NAME": "clients or server: refuse a plan whose claim is against another adversary",
        "--plot FILE...": "draw the attack beside the claimed trade-off curve (.svg, .png or .pdf)",
        "--confidence NUMBER:float": "that all bounds hold together (default 0.95)",
        "--seed N:int": "of the audit (default 0)",
        "--quiet": "no progress on stderr",
    }
    add_flags(parser.add_argument_group("audit"), flags | SHARES | SET | JSON)


def _audit(arguments: argparse.Namespace) -> int:
    if arguments.run is not None:
        given = Path(arguments.run)
        arguments.plan = str(given / "plan.toml" if given.is_dir() else given)
    check_flags(arguments)
    check_shares(arguments)
    if not (arguments.data or arguments.plan or arguments.set):
        raise ValueError(NO_DATA)
    confidence = 0.95 if arguments.confidence is None else arguments.confidence
    if not 0.5 <= confidence < 1:
        raise ValueError(f"--confidence {confidence}: expected a number from 0.5 to below 1")
    if arguments.epsilon is None and arguments.noise_multiplier is None and not arguments.plan:
        arguments.epsilon = 1.0
    _check(arguments)
    from coterie.cli.flags import make_plan

    plan = make_plan(arguments)
    if arguments.attack == "reconstruction":
        return _reconstruct(arguments, plan)
    return _bound(arguments, plan, confidence)


def _bound(arguments: argparse.Namespace, plan: "Plan", confidence: float) -> int:
    noise = plan.privacy.noise
    _check_view(arguments.view, local=noise.local, in_shares=noise.kind == "shares")
    found = _attack(arguments, plan, confidence)
    if arguments.run is not None and Path(arguments.run).is_dir():
        text = json.dumps(found.to_json(), allow_nan=False)
        write_atomically(Path(arguments.run) / "audit.json", text.encode())
    if arguments.plot:
        from coterie.report.charts import draw_trade_off

        for path in arguments.plot:
            draw_trade_off(found.guarantee, attack=found.errors).save(path)
    print(json.dumps(found.to_json(), allow_nan=False) if arguments.json else _text(found))
    return 0 if found.holds else 1


def _reconstruct(arguments: argparse.Namespace, plan: "Plan") -> int:
    from coterie.audit.reconstruction import FOUND, reconstruct

    shown = sys.stderr.isatty() and not arguments.quiet
    found = reconstruct(
        plan,
        plan.data.split()[0],
        clients=5 if arguments.trials is None else arguments.trials,
        seed=arguments.seed or 0,
        progress=partial(_print_progress, "attacks") if shown else lambda done, of: None,
    )
    if arguments.plot:
        import numpy as np

        from coterie.report.charts import reconstruction

        errors = {_TITLES[one.name]: np.concatenate(one.errors) for one in found.settings}
        for path in arguments.plot:
            reconstruction(errors, FOUND, "reconstruction").save(path)
    print(json.dumps(found.to_json(), allow_nan=False) if arguments.json else _learned(found))
    return 0


def _attack(arguments: argparse.Namespace, plan: "Plan", confidence: float) -> "Audit":
    from coterie.audit.empirical import Attack, audit, audit_one_run

    if arguments.sites is not None:
        need_flower()
    data, seed = plan.data.split()[0], arguments.seed or 0
    if arguments.one_run:
        many = arguments.canaries
        return audit_one_run(plan, data, canaries=many, confidence=confidence, seed=seed)
    shown = sys.stderr.isatty() and not arguments.quiet
    return audit(
        plan,
        data,
        attack=Attack(sites=arguments.sites or 0, hostile=bool(arguments.hostile)),
        trials=1000 if arguments.trials is None else arguments.trials,
        confidence=confidence,
        seed=seed,
        progress=partial(_print_progress, "trials") if shown else lambda done, of: None,
    )


def _check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not go together, before anything is computed."""
    if arguments.attack == "reconstruction":
        _check_reconstruction(arguments)
    if arguments.one_run and arguments.trials is not None:
        raise ValueError("--one-run and --trials: give one of them; a single run has no trials")
    if arguments.canaries is not None and not arguments.one_run:
        raise ValueError(f"--canaries {arguments.canaries}: canaries are those of --one-run")
    if arguments.sites is not None and (arguments.one_run or arguments.sites < 2):
        raise ValueError(f"--sites {arguments.sites}: expected 2 or more, and no --one-run")
    if arguments.hostile and arguments.sites is None:
        raise ValueError("--hostile: the coordinator is that of --sites; add --sites 2")
    for path in arguments.plot or ():
        if Path(path).suffix not in _PICTURES:
            raise ValueError(f"--plot {path}: expected a name that ends in {', '.join(_PICTURES)}")
        check_file(Path(path), "--plot")


def _check_reconstruction(arguments: argparse.Namespace) -> None:
    if arguments.trials is not None and arguments.trials < 1:
        raise ValueError(f"--trials {arguments.trials}: expected at least 1 client to attack")
    for name in ("one_run", "canaries", "sites", "hostile", "view", "confidence"):
        if getattr(arguments, name) not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"--attack reconstruction and {flag}: this attack reconstructs rows and bounds no "
                f"epsilon; leave out {flag}, or leave out --attack"
            )


def _check_view(view: str | None, *, local: bool, in_shares: bool = False) -> None:
    if in_shares and view in (None, "server"):
        return
    if view not in (None, "clients", "server"):
        raise ValueError(f"--view {view}: expected clients or server")
    if view == "server" and not local:
        raise ValueError(
            "--view server: the server adds the noise of this plan, and no epsilon is claimed "
            "against it; audit --view clients, or let clients add the noise (--noise local)"
        )
    if view == "clients" and local:
        raise ValueError(
            "--view clients: clients add the noise of this plan, and its epsilon holds against "
            "the server, who sees each message: audit --view server"
        )


def _print_progress(what: str, done: int, of: int) -> None:
    if done % max(1, of // 100) == 0 or done == of:
        print(f"\r{done} of {of} {what}", end="\n" if done == of else "", file=sys.stderr)


def _text(found: "Audit") -> str:
    """Return the result as lines for a terminal."""
    from coterie.privacy.guarantee import round_up, show_delta

    canary, claim = found.canary, found.guarantee
    one_run = "canaries" in canary
    many = f"{canary['canaries']} canaries of" if one_run else "canary:"
    uses = "" if one_run else f", mu {canary['mu']:.4g}"
    lines = [
        f"{found.method}, {found.rounds} rounds: claimed epsilon {round_up(found.claimed)} at "
        f"delta {show_delta(claim.delta)}, relation {claim.relation}, against the {found.view}",
        f"{many} {canary['rows']} rows, {canary['pattern']}, scale {canary['scale']:g}{uses}",
    ]
    for bound in found.bounds:
        lines.append(f"  lower bound {bound.epsilon:8.4g}  by {bound.estimator}")
    verdict = (
        "No lower bound is above the claim."
        if found.holds
        else "A LOWER BOUND IS ABOVE THE CLAIM: the guarantee does not hold."
    )
    level = f"{100 * found.best.confidence:g} %"
    runs = "One run" if one_run else f"{found.trials} trials in each world"
    lines.append(
        f"{verdict} {runs}, all bounds together hold with confidence {level}, "
        f"{found.seconds:.0f} s."
    )
    return "\n".join(lines)


def _learned(found: "Reconstructed") -> str:
    """Return what a curious server could learn, as lines for a terminal."""
    few, most = min(found.rows), max(found.rows)
    each = "1 row" if most == 1 else f"{most} rows" if few == most else f"{few} to {most} rows"
    seen = "the first round" if found.rounds == 1 else f"{found.rounds} rounds"
    lines = [
        f"{found.method}, model {found.model}: {len(found.rows)} clients with {each} each, "
        f"attacked by their contributions to {seen}",
        f"  {'':20}{'error':>10}{'rows found':>12}",
    ]
    for one in found.settings:
        error = "< 0.001" if one.error < 1e-3 else f"{one.error:.3g}"
        lines.append(f"  {_TITLES[one.name]:20}{error:>10}{one.found:>12.0%}")
    lines.append(
        "Error: median squared distance of a found row from the true one, in units of the variance "
        "of all rows. Found: error below 0.1."
    )
    lines += [_meaning(one, found) for one in found.settings if one.name != "guess"]
    if found.left_out:
        lines.append(f"Noise of clients is left out: {found.left_out}.")
    if not found.closed_form and found.local_steps != 1:
        taken = f"{found.local_steps} local steps" if found.local_steps else "a local solution"
        lines.append(
            f"The attack takes {taken} for one gradient step: this is a lower bound on what a "
            "better attack could do."
        )
    lines.append(f"A better attack may find more. Only noise has a proof. {found.seconds:.0f} s.")
    return "\n".join(lines)


def _meaning(one: "Setting", found: "Reconstructed") -> str:
    """Return one or two sentences on a setting."""
    from coterie.privacy.guarantee import round_up

    guess = found.settings[-1].found
    result = f"reconstructs {one.found:.0%} of these rows" if one.found else "finds no row"
    if 0 < one.found <= guess:
        result = "finds no more rows than a guess"
    if one.name == "trusted":
        return (
            f"A trusted server sees each clipped contribution, and {result} by this attack. "
            "No epsilon holds against it."
        )
    if one.name == "secure_aggregation":
        return f"With secure aggregation it sees a sum over {one.clients} clients, and {result}."
    return (
        f"With noise of clients (--noise local) it {result}, and epsilon "
        f"{round_up(found.epsilon)} holds against the server too."
    )
