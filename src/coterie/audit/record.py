"""Views recorded from real runs of MTL-SVM: its own method, mechanism, noise and account."""

import numpy as np
import torch

from coterie.audit.view import Array, Rule, View
from coterie.data.federated import FederatedDataset
from coterie.methods.localsvm import joined
from coterie.methods.mtlsvm import MTLSVM
from coterie.plan import Plan
from coterie.privacy.billboard import bound
from coterie.privacy.events import Gaussian
from coterie.rng import Rng


def record(plan: Plan, data: FederatedDataset, client: int) -> tuple[View, View]:
    """Run a plan round by round and keep what is seen of one client.

    All its rounds: a run without a budget may end earlier, at its duality gap, and show less.

    Args:
        plan: A plan of MTL-SVM in which everybody takes part in every round.
        data: Training rows of a binary task.
        client: Its number.

    Returns:
        The server's view and that of all other clients together.

    Raises:
        ValueError: If the run is of another kind than the attack is for.
    """
    method = _check(plan, data)
    spec, seed = data.spec, plan.simulation_seed
    rng = Rng.fresh() if seed is None else Rng.seeded(seed)
    everyone = data.clients(np.arange(spec.clients, dtype=np.int64))
    shared = method.init(spec, Rng.seeded(seed or 0).at("init"))
    personal = method.init_client_state(shared, spec, spec.clients)
    billboard = plan.open(spec, shared)
    seen: list[Array] = []
    for number in range(plan.posts):
        mechanism = billboard.mechanism(number)
        coins = rng.at("client", number)
        after, rows = method.local_update(shared, personal, everyone, coins, number)
        sent = joined(mechanism.clip(rows)[0]).double()
        part, kept = bound(mechanism, rows, everyone.ids)
        personal = method.on_clipped(personal, after, kept)
        post = billboard.post([part])
        own = sent[client]
        seen.append(_flat(joined(shared), own, joined(post.value), sent.sum(dim=0) - own))
        shared = method.server_update(shared, post)
    billboard.ledger.close()
    before, contributions, posts, others = np.stack(seen, axis=1)
    private = isinstance(billboard.mechanism(0).event(), Gaussian)
    clip = plan.clip(spec.clients) if private else None
    server = View.server(
        before,
        contributions,
        _rule(method, spec.clients),
        clip=clip,
        mask=method.mask,
        rows=int(data.counts[client]),
    )
    noise = max(plan.noise_multipliers(spec.clients), default=0.0) * (clip or 0.0)
    return server, server.others(posts, others, noise=noise)


def true_rows(data: FederatedDataset, client: int, *, bias: bool) -> tuple[Array, Array]:
    """Return a client's rows, with a 1 behind them for a bias, and labels of -1 and +1."""
    one = data.clients(np.array([client], dtype=np.int64))
    rows = one.x[0][one.mask[0].bool()].flatten(1).double().numpy()
    labels = one.y[0][one.mask[0].bool()].double().numpy().ravel()
    if bias:
        rows = np.column_stack([rows, np.ones(len(rows))])
    return rows, 2 * labels - 1


def _check(plan: Plan, data: FederatedDataset) -> MTLSVM:
    method = plan.method
    if not isinstance(method, MTLSVM):
        raise ValueError(f"{method.kind}: expected a plan of mtlsvm, which this attack is for")
    if data.spec.task != "binary":
        raise ValueError(f"a {data.spec.task} task: expected a binary one, for the hinge loss")
    if method.gamma != "add" or method.class_weight != "none":
        raise ValueError(
            f"gamma = {method.gamma!r}, class_weight = {method.class_weight!r}: expected 'add' and "
            "'none', the rule that the attack knows"
        )
    method.check(data.spec, cohort=plan.sampler.largest(data.spec.clients))
    events = {mechanism.event() for mechanism in plan.mechanisms(data.spec.clients)}
    if len(events) > 1 or not {e.name for e in events} <= {"gaussian", "non_private"}:
        raise ValueError("expected Gaussian noise, the same in every round, or none at all")
    if plan.sampler.participation(data.spec.clients).rate != 1:
        raise ValueError("a sampled cohort: expected a plan in which everybody takes part")
    return method


def _rule(method: MTLSVM, clients: int) -> Rule:
    return Rule(
        c1=method.c1,
        c2=method.c2,
        sigma=float(method.together or clients),
        steps="serial",
        passes=method.epochs,
    )


def _flat(*vectors: torch.Tensor) -> Array:
    flat: Array = np.stack([vector.double().cpu().numpy().ravel() for vector in vectors])
    return flat
