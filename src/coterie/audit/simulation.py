"""Views of MTL-SVM clients: simulated from the formulas, and recorded from runs of the library.

`client_messages` is written in plain NumPy from the formulas, independently of the library's solver
and method. The other clients are a random walk of w.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from coterie.audit.svm import Array, MaskKind, Rule, View
from coterie.core.rng import Rng
from coterie.data.federated import FederatedDataset
from coterie.methods.svm import joined
from coterie.planning.plan import Plan
from coterie.privacy.billboard import bound
from coterie.privacy.entropy import client_entropy

Mask = tuple[Literal["bernoulli"], float] | tuple[Literal["beta"], float, float, float]


@dataclass(frozen=True, kw_only=True)
class Defence:
    """A defence of a client's messages.

    Attributes:
        mask: None; ("bernoulli", keep): a row's step is kept with this probability; or ("beta", a,
            b, untouched): it is multiplied by Beta(a, b), but for this share of rows.
        mask_kind: "step" masks dual steps, so that alpha, v and the message agree; "paper" masks
            the message only, as published.
        clip: Bound on a message's norm; alpha and v take the same part of the step.
        noise: Standard deviation of the noise per coordinate of a release.
    """

    mask: Mask | None = None
    mask_kind: Literal["step", "paper"] = "step"
    clip: float | None = None
    noise: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Draw a factor for each row."""
        if self.mask is None:
            return np.ones(count)
        if self.mask[0] == "bernoulli":
            return (rng.random(count) < self.mask[1]).astype(np.float64)
        _, a, b, untouched = self.mask
        return np.where(rng.random(count) < untouched, 1.0, rng.beta(a, b, count))


def client_messages(
    rows: Array,
    labels: Array,
    rule: Rule,
    *,
    rounds: int,
    defence: Defence | None = None,
    others: float = 3.0,
    absent: bool = False,
    seed: int = 0,
) -> tuple[View, View]:
    """Return the server's view and that of all others of a simulated client.

    Its rows are (n, d), their labels -1 and +1. The other clients' part of w is a random walk with
    a norm of about `others`. With `absent` its contributions are zeros: the neighbouring run of the
    guarantee.
    """
    if set(np.unique(labels)) - {-1.0, 1.0}:
        raise ValueError(f"labels are {np.unique(labels)[:5]}: expected -1 and +1")
    defence, (count, width) = defence or Defence(), rows.shape
    rng = Rng.seeded(seed).at("play").numpy()
    signed = labels[:, None] * rows
    alpha, v, own, walk = np.zeros(count), np.zeros(width), np.zeros(width), np.zeros(width)
    shared, sent, noises = np.zeros((3, rounds, width))
    for turn in range(rounds):
        shared[turn] = own + walk
        mask = defence.draw(count, rng)
        steps = mask if defence.mask_kind == "step" else np.ones(count)
        moved = _local(signed, alpha, shared[turn] + v, rule, steps, rng)
        full = moved @ signed
        message = full if defence.mask_kind == "step" else (mask * moved) @ signed
        kept = 0.0 if absent else _kept(message, defence.clip)
        alpha, v, sent[turn] = alpha + kept * moved, v + kept * full / rule.c2, kept * message
        noises[turn] = defence.noise * rng.standard_normal(width)
        own = own + sent[turn] + noises[turn]
        walk = 0.8 * walk + 0.6 * others / np.sqrt(width) * rng.standard_normal(width)
    kind: MaskKind = "none" if defence.mask is None else defence.mask_kind
    server = View(shared=shared, messages=sent, rule=rule, clip=defence.clip, mask=kind, rows=count)
    walked = np.diff(shared + 0.0, axis=0, append=(own + walk)[None]) - sent - noises
    posts = sent + noises + walked
    return server, replace(server, messages=posts - walked, noise=defence.noise)


def _kept(message: Array, clip: float | None) -> float:
    return 1.0 if clip is None else min(1.0, clip / max(float(np.linalg.norm(message)), 1e-300))


def _local(
    signed: Array,
    alpha: Array,
    start: Array,
    rule: Rule,
    mask: Array,
    rng: np.random.Generator,
) -> Array:
    """Return the change of alpha in a round."""
    curvature = rule.curvature * (signed**2).sum(axis=1)
    if rule.steps == "simultaneous":
        aim = np.clip(alpha + (1 - signed @ start) / curvature, 0.0, rule.c1)
        moved: Array = mask * (aim - alpha)
        return moved
    now, dw = alpha.copy(), np.zeros(len(start))
    for i in rng.permutation(len(signed)):
        slack = 1 - signed[i] @ (start + rule.curvature * dw)
        step = mask[i] * (np.clip(now[i] + slack / curvature[i], 0.0, rule.c1) - now[i])
        now[i] += step
        dw += step * signed[i]
    return now - alpha


def record(plan: Plan, data: FederatedDataset, client: int) -> dict[str, View]:
    """Return views of one client in a run of a plan, by name.

    - "server": its clipped messages, with the client's own noise where the plan has local noise;
    - "sum": the sums over all clients before noise, taken for the messages of one client;
    - "others": the view of all other clients together.

    The attack is for methods with a `step_rule` (MTL-SVM), binary tasks, and plans in which all
    clients take part in every round.
    """
    rule = _check(plan, data)
    method, spec, seed = plan.method, data.spec, plan.simulation_seed
    mask = rule.pop("mask")
    rng = Rng.fresh() if seed is None else Rng.seeded(seed)
    everyone = data.clients(np.arange(spec.clients, dtype=np.int64))
    shared = method.init(spec, Rng.seeded(seed or 0).at("init"))
    personal = method.init_client_state(shared, spec, spec.clients)
    billboard = plan.open(spec)
    seen: list[Array] = []
    for number in range(plan.posts):
        mechanism, noise = billboard.mechanism(number), client_entropy(seed, number)
        stream = rng.at("client", number)
        after, rows = method.local_update(shared, personal, everyone, stream, number)
        mine = {name: leaf[client : client + 1] for name, leaf in rows.items()}
        own = bound(mechanism, mine, everyone.ids[client : client + 1], noise)[0].total
        part, kept = bound(mechanism, rows, everyone.ids, noise)
        personal = method.on_clipped(personal, after, kept)
        post = billboard.post([part])
        seen.append(_flat(*map(joined, (shared, own, part.total, post.value))))
        shared = method.server_update(shared, post)
    billboard.ledger.close()
    before, sent, sums, posts = np.stack(seen, axis=1)
    clip = plan.clip(spec.clients) if plan.private else None
    noise_of = max(plan.noise_multipliers(spec.clients), default=0.0) * (clip or 0.0)
    local = plan.privacy.noise.local
    server = View(
        shared=before,
        messages=sent,
        rule=Rule(steps="serial", **rule),
        clip=clip,
        noise=noise_of if local else 0.0,
        mask=mask,
        rows=int(data.counts[client]),
    )
    others = replace(server, messages=posts - (sums - sent), noise=noise_of)
    return {"server": server, "sum": replace(server, messages=sums), "others": others}


def true_rows(data: FederatedDataset, client: int, *, bias: bool) -> tuple[Array, Array]:
    """Return a client's rows, with a 1 behind them for a bias, and labels of -1 and +1."""
    one = data.clients(np.array([client], dtype=np.int64))
    rows = one.x[0][one.mask[0].bool()].flatten(1).double().numpy()
    labels = one.y[0][one.mask[0].bool()].double().numpy().ravel()
    if bias:
        rows = np.column_stack([rows, np.ones(len(rows))])
    return rows, 2 * labels - 1


def _check(plan: Plan, data: FederatedDataset) -> dict[str, Any]:
    """Return the rule of the plan's dual steps; refuse plans that the attack is not for."""
    method, spec = plan.method, data.spec
    rule_of = getattr(method, "step_rule", None)
    if rule_of is None:
        raise ValueError(
            f"{method.kind}: expected a plan of mtlsvm, or of another method with a step_rule, "
            "which this attack is for"
        )
    if spec.task != "binary":
        raise ValueError(f"a {spec.task} task: expected a binary one, for the hinge loss")
    rule: dict[str, Any] = rule_of(spec.clients)
    method.check(spec, cohort=plan.sampler.largest(spec.clients))
    events = {mechanism.event() for mechanism in plan.mechanisms(spec.clients)}
    if len(events) > 1 or not {e.name for e in events} <= {
        "gaussian",
        "local_gaussian",
        "non_private",
    }:
        raise ValueError("expected Gaussian noise, the same in every round, or none at all")
    if plan.sampler.participation(spec.clients).rate != 1:
        raise ValueError("a sampled cohort: expected a plan in which all clients take part")
    return rule


def _flat(*vectors: torch.Tensor) -> Array:
    flat: Array = np.stack([vector.double().cpu().numpy().ravel() for vector in vectors])
    return flat
