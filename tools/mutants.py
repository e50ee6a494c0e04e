"""Break the mechanism on purpose and report which test fails.

Each mutant is one edit of a copy of the sources; the tests named for it must fail on the copy and
pass on the original. Run by `make mutants`; the table is in docs/mutants.md.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """An edit (and, if it takes two, another), and the test or test file that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    test: str
    also: tuple[str, str] | None = None


MUTANTS = (
    Mutant(
        "noise halved",
        "privacy/mechanisms.py",
        "return self.noise_multiplier * self.bound\n",
        "return self.noise_multiplier * self.bound / 2\n",
        "tests/statistics/test_noise.py",
    ),
    Mutant(
        "clip skipped",
        "core/tree.py",
        "    over = relative > bound / unit\n",
        "    over = relative > math.inf\n",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "float32 norms",
        "core/tree.py",
        "torch.stack([flat.square().sum(dim=1) for flat in scaled.values()]).sum(dim=0)",
        "torch.stack([flat.float().square().sum(dim=1).double() for flat in scaled.values()]"
        ").sum(dim=0)",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "rounding forgotten in the clip",
        "privacy/mechanisms.py",
        "clip_rows(rows, self.bound - step * math.sqrt(numbers) / 2)",
        "clip_rows(rows, self.bound)",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "a weight added",
        "engine/rounds.py",
        "    part, kept = bound(state.mechanism, rows, clients.ids",
        "    for leaf in rows.values():\n"
        "        leaf.mul_(clients.counts.reshape(-1, *[1] * (leaf.dim() - 1)))\n"
        "    part, kept = bound(state.mechanism, rows, clients.ids",
        "tests/methods/test_pmtl.py",
    ),
    Mutant(
        "a weight added after the clip",
        "privacy/mechanisms.py",
        "leaf.mul_(1 / step).round_().mul_(step), clipped)",
        "leaf.mul_(1 / step).round_().mul_(2 * step), clipped)",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "ledger charged after the sum",
        "privacy/billboard.py",
        "            self._ledger.charge(index)\n",
        "",
        "tests/privacy/test_billboard.py",
        (
            "        return billboard._publish(",
            "        billboard._ledger.charge(self.index)\n        return billboard._publish(",
        ),
    ),
    Mutant(
        "realised cohort as denominator",
        "engine/simulate.py",
        "        state = RoundState(",
        "        self.billboard._cohort = max(len(cohort), 1)\n        state = RoundState(",
        "tests/engine/test_simulate.py",
    ),
    Mutant(
        "noise from a fixed seed",
        "privacy/entropy.py",
        "return SystemEntropy() if seed is None else SeededEntropy(seed, purpose, index, client)",
        "return SeededEntropy(seed or 0, purpose, index, client)",
        "tests/statistics/test_noise.py",
    ),
    Mutant(
        "a neighbour's row count decides how a client is solved",
        "solvers/ridge.py",
        "        end = min(end, begin + int((clients.counts[order[begin:]] == longest).sum()))\n",
        "",
        "tests/solvers/test_ridge.py",
    ),
    Mutant(
        "personal models handed to the wrong client",
        "engine/simulate.py",
        "personal_models(method, shared, personal, block, stream)",
        "personal_models(method, shared, {name: leaf.roll(1, 0) for name, leaf in "
        "personal.items()}, block, stream)",
        "tests/contracts/test_methods.py",
    ),
    Mutant(
        "bounds rounded down in print",
        "privacy/guarantee.py",
        "Context(prec=digits, rounding=ROUND_CEILING)",
        'Context(prec=digits, rounding="ROUND_FLOOR")',
        "tests/cli/test_run.py",
    ),
    Mutant(
        "replace counted as zero-out",
        "privacy/mechanisms.py",
        'return self.bound * (2.0 if relation == "replace" else 1.0)',
        "return self.bound",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "second moments: 2 K stated for K^2",
        "privacy/moments.py",
        'return self.bound**2 * (SQRT2 if relation == "replace" else 1.0)',
        'return 2 * self.bound * (SQRT2 if relation == "replace" else 1.0)',
        "tests/properties/test_moments.py",
    ),
    Mutant(
        "second moments: noise for 2 K in place of K^2",
        "privacy/moments.py",
        "deviation = self.noise_multiplier * self.bound**2 / step",
        "deviation = self.noise_multiplier * 2 * self.bound / step",
        "tests/statistics/test_moments.py",
    ),
    Mutant(
        "second moments: half of tau off the diagonal",
        "privacy/moments.py",
        "np.where(rows == columns, deviation, deviation / SQRT2)",
        "np.where(rows == columns, deviation, deviation / 2)",
        "tests/statistics/test_moments.py",
    ),
    Mutant(
        "second moments: rounding forgotten in the clip",
        "privacy/moments.py",
        "clip_rows(rows, bound - slack)",
        "clip_rows(rows, bound)",
        "tests/properties/test_moments.py",
    ),
    Mutant(
        "second moments: replaced clients charged as zeroed ones",
        "privacy/moments.py",
        "return Gaussian(self.noise_multiplier, SQRT2)",
        "return Gaussian(self.noise_multiplier, 1.0)",
        "tests/privacy/test_noise.py",
    ),
    Mutant(
        "second moments: posted as finely as they are summed",
        "privacy/moments.py",
        "return max(vector_grid(bound) ** 2, coarse)",
        "return vector_grid(bound) ** 2",
        "tests/statistics/test_moments.py",
    ),
    Mutant(
        "squares: not clipped",
        "privacy/moments.py",
        "self.inner.clip(map_leaves(lambda leaf: leaf.square_(), shorter))",
        "clip_rows(map_leaves(lambda leaf: leaf.square_(), shorter), math.inf)",
        "tests/properties/test_moments.py",
    ),
    Mutant(
        "Laplace: clipped in l2",
        "privacy/mechanisms.py",
        "torch.stack([flat.abs().sum(dim=1) for flat in flats]).sum(dim=0)",
        "torch.stack([flat.square().sum(dim=1) for flat in flats]).sum(dim=0).sqrt()",
        "tests/properties/test_moments.py",
    ),
    Mutant(
        "Laplace: scale rounded down",
        "privacy/mechanisms.py",
        "scale = math.ceil(",
        "scale = math.floor(",
        "tests/properties/test_moments.py",
    ),
    Mutant(
        "Laplace: zero drawn twice as often",
        "privacy/mechanisms.py",
        "        if size:\n            return -size",
        "        return -size",
        "tests/statistics/test_moments.py",
    ),
    Mutant(
        "Wishart: five degrees more charged than drawn",
        "privacy/moments.py",
        "return Wishart(self.degrees, ",
        "return Wishart(self.degrees + 5, ",
        "tests/statistics/test_moments.py",
    ),
    Mutant(
        "Wishart: one vector too few drawn",
        "privacy/moments.py",
        "return self.degrees + features - 1",
        "return self.degrees + features - 2",
        "tests/statistics/test_moments.py",
    ),
    Mutant(
        "ledger blind to an event's numbers",
        "privacy/ledger.py",
        "repr(named)",
        "repr([type(event).__name__ for event in self.events])",
        "tests/privacy/test_noise.py",
    ),
    Mutant(
        "rows to clients: one row's sensitivity for all rows",
        "privacy/published.py",
        "return 2 / rows * ",
        "return 1 / rows * ",
        "tests/privacy/test_published.py",
    ),
    Mutant(
        "clipped contribution, unclipped duals",
        "methods/mtlsvm.py",
        "return map_leaves(lambda old, new: kept_part(old, new, kept), start, after)",
        "return after",
        "tests/methods/test_mtlsvm.py",
    ),
    Mutant(
        "unsafe sums of clients' steps",
        "methods/mtlsvm.py",
        "            return 1.0, float(most)\n",
        "            return 1.0, 1.0\n",
        "tests/methods/test_mtlsvm.py",
    ),
    Mutant(
        "a private run that stops by its gap",
        "engine/simulate.py",
        "self.duality = rule.duality if is_free else None",
        "self.duality = rule.duality",
        "tests/methods/test_mtlsvm.py",
    ),
    Mutant(
        "a budget that waits by reported times",
        "engine/simulate.py",
        "stragglers.wait_is_reported and plan.privacy.epsilon != math.inf",
        "False",
        "tests/engine/test_stragglers.py",
    ),
    Mutant(
        "one random stream for everybody's split",
        "data/federated.py",
        "rng.words(owner, rank)",
        "rng.words(0 * owner, np.arange(len(owner)))",
        "tests/data/test_federated.py",
    ),
    Mutant(
        "one client's noise for the whole block",
        "privacy/mechanisms.py",
        "        return entropy.keys(clients)\n",
        "        return entropy.keys([clients[0]] * len(clients))\n",
        "tests/statistics/test_local.py",
    ),
    Mutant(
        "local noise amplified by hidden sampling",
        "privacy/accounting.py",
        "for event, times in counted), participation.shown\n",
        "for event, times in counted), participation\n",
        "tests/privacy/test_accounting_local.py",
    ),
    Mutant(
        "a contribution that leaves without its noise",
        "privacy/mechanisms.py",
        "            clipped = self.perturb_rows(clipped, ids, entropy)\n",
        "            pass\n",
        "tests/properties/test_local.py",
    ),
    Mutant(
        "more honest clients than a round has",
        "privacy/guarantee.py",
        "    if honest > fewest:\n",
        "    if False:\n",
        "tests/privacy/test_accounting_local.py",
    ),
    Mutant(
        "half the delta under a trade-off curve",
        "privacy/profiles.py",
        "return epsilon, 1 - np.array([profile.delta(float(e)) for e in epsilon])",
        "return epsilon, 1 - 0.5 * np.array([profile.delta(float(e)) for e in epsilon])",
        "tests/privacy/test_profiles_tradeoff.py",
    ),
    Mutant(
        "late clients counted",
        "engine/simulate.py",
        "return np.intersect1d(cohort, timed.answered), timed",
        "return cohort, timed",
        "tests/engine/test_stragglers.py",
    ),
    Mutant(
        "blocks: shares of the budget forgotten",
        "privacy/mechanisms.py",
        "self.noise_multiplier / math.sqrt(block.share) * (1 + _SHARE_TOLERANCE)",
        "self.noise_multiplier * (1 + _SHARE_TOLERANCE)",
        "tests/statistics/test_blocks.py",
    ),
    Mutant(
        "blocks: a replaced client moves as far as a zeroed one",
        "privacy/mechanisms.py",
        "    return min(2.0, max(1.0, math.sqrt(square)))\n",
        "    return 1.0\n",
        "tests/properties/test_blocks.py",
    ),
    Mutant(
        "blocks: negative entries of positive blocks kept",
        "privacy/mechanisms.py",
        'leaf if block.kind == "signed" else leaf.clamp_min(0.0)',
        "leaf",
        "tests/properties/test_blocks.py",
    ),
    Mutant(
        "blocks: a broken client's other blocks kept",
        "privacy/mechanisms.py",
        "clipped[block.name] = cut[block.name].masked_fill_(flags, 0.0)",
        "clipped[block.name] = cut[block.name]",
        "tests/properties/test_blocks.py",
    ),
    Mutant(
        "noise calibrated to an outsider",
        "privacy/noise.py",
        '"participation": self.participation.to_others,',
        '"participation": self.participation,',
        "tests/privacy/test_noise.py",
    ),
    Mutant(
        "a paper's claim hides the budget from verification",
        "verification/certificate.py",
        "claims != {kind in _REPRODUCTIONS}",
        "False",
        "tests/verification/test_certificate.py",
    ),
    Mutant(
        "review: a person's contributions become zero",
        "privacy/reviewer.py",
        'profile_of_group(profile_under(guarantee, "replace"), clients)',
        'profile_of_group(profile_under(guarantee, "zero_out"), clients)',
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: a person at k clients counts once",
        "privacy/reviewer.py",
        'bounds = [profile_of_group(profile_under(guarantee, "replace"), clients)]',
        'bounds = [profile_under(guarantee, "replace")]',
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: delta of a group not multiplied",
        "privacy/reviewer.py",
        "math.exp(each * step) for step in range(self.size)",
        "1.0 for step in range(self.size)",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: a group of k Gaussian neighbours at sqrt(k)",
        "privacy/reviewer.py",
        "return GaussianProfile(size * one.mu)",
        "return GaussianProfile(math.sqrt(size) * one.mu)",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: a group of groups counted once",
        "privacy/reviewer.py",
        "GroupProfile(one.one, size * one.size)",
        "GroupProfile(one.one, size)",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: Wishart replaced in one step",
        "privacy/reviewer.py",
        "return profile_of_group(zeroed, 2)",
        "return zeroed",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: the search for a group ends below",
        "privacy/reviewer.py",
        "        return high\n",
        "        return low * (1 - 1e-4)\n",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: what overflows counts as nothing",
        "privacy/reviewer.py",
        "        if epsilon > _LARGEST:  # the terms overflow\n            return 1.0",
        "        if epsilon > _LARGEST:  # the terms overflow\n            return 0.0",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: mu of the run's own relation only",
        "privacy/reviewer.py",
        "    found = profile_under(guarantee, relation)\n    return found.mu",
        "    found = profile_under(guarantee, guarantee.relation)\n    return found.mu",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: epsilon of the run's own relation only",
        "privacy/reviewer.py",
        "epsilon = profile_under(guarantee, relation).epsilon(guarantee.delta)",
        "epsilon = guarantee.epsilon",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: the best attack misses what it finds",
        "privacy/reviewer.py",
        "float(power) for power in guarantee.detection(alarms)",
        "float(power) for power in guarantee.trade_off(alarms)",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: deltas of the other end of the profile",
        "privacy/reviewer.py",
        "guarantee.delta_at(epsilon) for epsilon in epsilons",
        "guarantee.delta_at(2 * epsilon) for epsilon in epsilons",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: a sampled person is drawn as one client is",
        "privacy/reviewer.py",
        "several = min(1.0, clients * who.rate)",
        "several = who.rate",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: a Poisson-sampled person is drawn as one client is",
        "privacy/reviewer.py",
        "several = -math.expm1(clients * math.log1p(-who.rate))",
        "several = who.rate",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: a sampled person moves a sum as one client does",
        "privacy/reviewer.py",
        "Gaussian(z / clients) for z",
        "Gaussian(z) for z",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: noise of the server counted for each client",
        "privacy/reviewer.py",
        'who.kind not in ("fixed", "cyclic") and all(e.local for e in events):',
        'who.kind not in ("fixed", "cyclic"):',
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "review: messages of a person counted once",
        "privacy/reviewer.py",
        'coalition_profile(events * clients, who, "replace")',
        'coalition_profile(events, who, "replace")',
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "several runs: each sampling gets all of delta",
        "privacy/guarantee.py",
        "share = delta / max(len(parts), 1)",
        "share = delta",
        "tests/privacy/test_guarantee.py",
    ),
    Mutant(
        "several runs: only the first of each sampling",
        "privacy/guarantee.py",
        "events=_without_some_in_shares([event for one in runs for event in one.events])",
        "events=runs[0].events",
        "tests/privacy/test_guarantee.py",
    ),
    Mutant(
        "several runs: a delta shown rounded down",
        "privacy/guarantee.py",
        "rounding=ROUND_CEILING).plus(exact)",
        "rounding=None).plus(exact)",
        "tests/privacy/test_guarantee.py",
    ),
    Mutant(
        "register: a large delta stretches a total",
        "runs/budget.py",
        "after = known.account(both, total.delta, asked)",
        "after = known.account(both, max(one.delta for one in asked), asked)",
        "tests/runs/test_budget.py::test_a_large_delta_does_not_stretch_a_total",
    ),
    Mutant(
        "register: the run that asks is free",
        "runs/budget.py",
        "after = known.account(both, total.delta, asked)",
        "after = known.account(both, total.delta)",
        "tests/runs/test_budget.py::test_a_total_is_exceeded_by_composition_not_by_addition",
    ),
    Mutant(
        "register: only runs on exactly the same clients add up",
        "runs/budget.py",
        "if group.common(one).keys}",
        "if one == group}",
        "tests/runs/test_budget.py::test_a_client_has_spent_the_runs_that_it_took_part_in",
    ),
    Mutant(
        "audited: clip off by a factor of two",
        "privacy/mechanisms.py",
        "clip_rows(rows, self.bound - step * math.sqrt(numbers) / 2)",
        "clip_rows(rows, 2 * self.bound - step * math.sqrt(numbers) / 2)",
        "tests/audit/test_claims.py::test_the_claim_holds[one]",
    ),
    Mutant(
        "audited: noise halved",
        "privacy/mechanisms.py",
        "return self.noise_multiplier * self.bound\n",
        "return self.noise_multiplier * self.bound / 2\n",
        "tests/audit/test_claims.py::test_the_claim_holds[loud]",
    ),
    Mutant(
        "audited: contributions weighted by rows",
        "engine/rounds.py",
        "        after, rows = state.method.local_update(\n",
        "        many = int(clients.counts[0]) if len(clients) else 1\n"
        "        after, rows = state.method.local_update(\n",
        "tests/audit/test_claims.py::test_the_claim_holds[loud]",
        (
            "    part, kept = bound(state.mechanism, rows, clients.ids, noise)\n    after =",
            "    part, kept = bound(state.mechanism, rows, clients.ids, noise)\n"
            "    for _ in range(many - 1):\n"
            "        part = part + bound(state.mechanism, rows, clients.ids, noise)[0]\n"
            "    after =",
        ),
    ),
    Mutant(
        "audited: mean over the clients that take part",
        "engine/rounds.py",
        "    part, kept = bound(state.mechanism, rows, clients.ids, noise)\n    after =",
        "    part, kept = bound(state.mechanism, rows, clients.ids, noise)\n"
        "    for leaf in part.total.values():\n"
        "        leaf *= clients.spec.clients / len(clients)\n"
        "    after =",
        "tests/audit/test_claims.py::test_the_claim_holds[loud]",
    ),
    Mutant(
        "audited: noise of the first round used again",
        "privacy/billboard.py",
        "entropy, draws = self._entropy(index), mechanism.draws(shapes)",
        "entropy, draws = self._entropy(0), mechanism.draws(shapes)",
        "tests/audit/test_claims.py::test_the_claim_holds[random]",
    ),
    Mutant(
        "audited: amplification for a visible cohort",
        "privacy/accounting.py",
        "    if participation.visible:\n        return mixture_profile(groups, rate, scale)\n",
        "",
        "tests/audit/test_claims.py::test_the_claim_holds[visible]",
    ),
    Mutant(
        "audited: one client silences its site",
        "engine/rounds.py",
        "    if len(clients) > 1:\n        return _one_by_one(state, personal, clients)\n    half",
        "    half",
        "tests/audit/test_site_attack.py",
    ),
    Mutant(
        "audited: a split in which clients share random numbers",
        "data/federated.py",
        "rng.words(owner, rank)",
        "rng.words(np.zeros_like(owner), np.arange(len(owner)))",
        "tests/audit/test_claims.py::test_the_claim_holds[split]",
    ),
    Mutant(
        "audited: a site answers a round twice",
        "deploy/site.py",
        "        if stored is not None and stored[0] != request:\n",
        "        if stored is not None and stored[0] != request:\n            stored = None\n"
        "        if False:\n",
        "tests/audit/test_sites.py::test_a_hostile_coordinator_learns_no_more",
    ),
    Mutant(
        "banded: bands wider than the schedule",
        "privacy/banded.py",
        "BandedSum(one, min(period, rounds), rounds, index)",
        "BandedSum(one, min(2 * period, rounds), rounds, index)",
        "tests/privacy/test_banded.py",
    ),
    Mutant(
        "banded: columns that are longer than 1",
        "privacy/banded.py",
        "self.inner.add_normals(total, noise * scale)",
        "self.inner.add_normals(total, noise * scale * first[0])",
        "tests/privacy/test_banded.py",
    ),
    Mutant(
        "schedule: one round of a client forgotten",
        "privacy/accounting.py",
        "    left = -(-sum(times for _, times in counted) // participation.period)\n",
        "    left = sum(times for _, times in counted) // participation.period\n",
        "tests/privacy/test_banded.py",
    ),
    Mutant(
        "schedule: the noisiest rounds count",
        "privacy/accounting.py",
        "key=lambda one: one[0].gaussian_noise(relation) or 0.0)",
        "key=lambda one: -(one[0].gaussian_noise(relation) or 0.0))",
        "tests/privacy/test_banded.py",
    ),
    Mutant(
        "schedule: two runs count as one longer run",
        "privacy/guarantee.py",
        "for one in map(_of_one_client, guarantees):",
        "for one in guarantees:",
        "tests/privacy/test_banded.py",
    ),
    Mutant(
        "schedule: sites answer out of turn",
        "deploy/site.py",
        "        if scheduled is None:\n",
        "        if True:\n",
        "tests/deploy/test_site.py",
    ),
    Mutant(
        "shares: corrupt clients' shares counted",
        "privacy/shares.py",
        "return self.minimum_clients - self.corrupt\n",
        "return self.minimum_clients\n",
        "tests/properties/test_shares.py",
    ),
    Mutant(
        "shares: a quarter of the variance off the diagonal",
        "privacy/shares.py",
        "self._variance(square / 2)",
        "self._variance(square / 4)",
        "tests/properties/test_shares.py",
    ),
    Mutant(
        "shares: clients that are not drawn add none",
        "engine/rounds.py",
        "    if not len(rest):\n",
        "    if True:\n",
        "tests/engine/test_simulate.py",
    ),
    Mutant(
        "shares: one client's noise for the whole block",
        "privacy/shares.py",
        "sources = [entropy(client) for client in clients]",
        "sources = [entropy(clients[0]) for client in clients]",
        "tests/properties/test_shares.py",
    ),
    Mutant(
        "shares: a sum is unmasked whose noise is missing",
        "deploy/site.py",
        "        if hosted < needed:\n",
        "        if False:\n",
        "tests/deploy/test_masked_rounds.py",
    ),
    Mutant(
        "shares: a sum is released whose noise is missing",
        "deploy/coordinator.py",
        "        if noisy < least:\n",
        "        if False:\n",
        "tests/deploy/test_masked_rounds.py",
    ),
    Mutant(
        "shares: sampling counts against the coordinator that draws",
        "privacy/guarantee.py",
        '"coordinator_and_corrupt": against(shared, who.always)',
        '"coordinator_and_corrupt": against(shared, who)',
        "tests/privacy/test_shares.py",
    ),
    Mutant(
        "shares: one share counted as the noise of all",
        "privacy/guarantee.py",
        "against([e.against(1) for e in shared], who.to_others)",
        "against(shared, who.to_others)",
        "tests/privacy/test_shares.py",
    ),
    Mutant(
        "shares: the most that collude of several runs",
        "privacy/guarantee.py",
        "min(e.corrupt for e in shared)",
        "max(e.corrupt for e in shared)",
        "tests/privacy/test_guarantee.py",
    ),
    Mutant(
        "discrete Gaussian: zero drawn twice as often",
        "privacy/discrete.py",
        "((x > 0) | (sign > 0))",
        "(x >= 0)",
        "tests/statistics/test_shares.py",
    ),
    Mutant(
        "discrete Gaussian: doubtful proposals kept",
        "privacy/discrete.py",
        "            if word + 1 <= p - slack:\n                return True\n",
        "            return True\n",
        "tests/statistics/test_shares.py",
    ),
    Mutant(
        "keyed noise: one key for all clients of a block",
        "privacy/entropy.py",
        "keys = derive_keys(clients, self.seed",
        "keys = derive_keys([clients[0]] * len(clients), self.seed",
        "tests/statistics/test_local.py",
    ),
    Mutant(
        "keyed noise: keys of 64 bits",
        "privacy/entropy.py",
        "words = [source.words(4) for source in sources]",
        "words = [source.words(1).repeat(4) for source in sources]",
        "tests/privacy/test_chacha.py",
    ),
    Mutant(
        "keyed noise: the first blocks of the stream again and again",
        "privacy/chacha.py",
        "        _blocks(key, group * LANES, x)\n",
        "        _blocks(key, 0, x)\n",
        "tests/privacy/test_chacha.py",
    ),
    Mutant(
        "keyed noise: eight rounds of the cipher",
        "privacy/chacha.py",
        "    for _ in range(10):\n        for k in range(4):",
        "    for _ in range(4):\n        for k in range(4):",
        "tests/privacy/test_chacha.py",
    ),
    Mutant(
        "keyed noise: tails no finer than 64 bits",
        "privacy/chacha.py",
        "            fraction = (np.float64(finer) + 0.5) * _SCALE\n",
        "            fraction = 0.5\n",
        "tests/privacy/test_chacha.py",
    ),
    Mutant(
        "keyed noise: threads of a draw overlap",
        "privacy/chacha.py",
        "for first in range(0, groups, share)",
        "for first in range(0, groups, share + 1)",
        "tests/privacy/test_chacha.py",
    ),
    Mutant(
        "ranks: every rank computes all clients",
        "engine/simulate.py",
        "self.speed.clients(like), self.owned)\n",
        "self.speed.clients(like))\n",
        "tests/engine/test_ranks.py",
    ),
    Mutant(
        "ranks: the sums of others are left out",
        "core/ranks.py",
        "            dist.reduce(flat, dst=0)\n",
        "            pass\n",
        "tests/engine/test_ranks.py",
    ),
    Mutant(
        "ranks: every rank adds the shares of all who are not drawn",
        "engine/simulate.py",
        "self.data.spec, cohort, self.owned)",
        "self.data.spec, cohort, self._everyone)",
        "tests/engine/test_ranks.py::test_releases_are_those_of_one_process[shares-3]",
    ),
    Mutant(
        "ranks: journals are lost when rows are laid out again",
        "engine/store.py",
        "    for store in old:\n        store.recover(released)\n",
        "",
        "tests/engine/test_store.py",
    ),
    Mutant(
        "published: a cohort of fixed size hides its members",
        "privacy/published.py",
        "profile(events, fixed.to_others, ",
        "profile(events, fixed, ",
        "tests/privacy/test_published_claims.py",
    ),
    Mutant(
        "published: noise of the mean taken for that of the sum",
        "privacy/published.py",
        "cohort * sigma / gamma",
        "clients * sigma / gamma",
        "tests/privacy/test_published_claims.py",
    ),
    Mutant(
        "reviewer: a person at several sampled clients moves the sum once",
        "privacy/reviewer.py",
        "[Gaussian(z / clients) for z in noise",
        "[Gaussian(z) for z in noise",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "reviewer: a person at several clients is drawn as often as one",
        "privacy/reviewer.py",
        "several = -math.expm1(clients * math.log1p(-who.rate))",
        "several = who.rate",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "reviewer: one message of a person at several clients",
        "privacy/reviewer.py",
        "coalition_profile(events * clients, who",
        "coalition_profile(events, who",
        "tests/privacy/test_reviewer.py",
    ),
    Mutant(
        "effects: columns scaled by the rows at hand",
        "data/effects.py",
        "        cut = x.clamp(-RANGE, RANGE)\n",
        "        cut = (x / x.abs().amax(dim=0).clamp_min(1e-9)).clamp(-RANGE, RANGE)\n",
        "tests/data/test_effects.py",
    ),
    Mutant(
        "curves: columns scaled by the rows at hand",
        "methods/curves.py",
        "    wide = torch.cat([x, design(x)], dim=1)\n",
        "    wide = torch.cat([x, design(x / x.abs().amax())], dim=1)\n",
        "tests/methods/test_curves.py",
    ),
    Mutant(
        "medians of all clients fill gaps",
        "data/federated.py",
        "            fills[client, known] = np.nanmedian(own, axis=0)\n",
        "            fills[client, known] = np.nanmedian(features, axis=0)[known]\n",
        "tests/data/test_tables.py",
    ),
    Mutant(
        "verify: shares of more clients than there are",
        "verification/folder.py",
        'if event.get("minimum_clients", 1) > clients',
        "if False",
        "tests/verification/test_folder.py",
    ),
    Mutant(
        "register: a run is marked and not entered",
        "runs/budget.py",
        "entries=(*known.entries, made)))",
        "entries=known.entries))",
        "tests/runs/test_budget.py",
    ),
)


def apply(mutant: Mutant, text: str) -> str:
    """Return the source with the mutant's edit.

    Raises:
        ValueError: If a text to replace does not occur exactly once.
    """
    for old, new in ((mutant.old, mutant.new), *((mutant.also,) if mutant.also else ())):
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} does not hold {old!r} exactly once")
        text = text.replace(old, new)
    return text


def main() -> int:
    """Try every mutant; print a Markdown table; fail if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a mutant's name")
    only = parser.parse_args().only or ""
    survivors = 0
    print("| broken on purpose | failing test |\n|---|---|")
    for mutant in MUTANTS:
        if only in mutant.name:
            red = _failing(mutant)
            survivors += not red
            print(f"| {mutant.name} | {red or 'SURVIVED'} |", flush=True)
    return 1 if survivors else 0


def _failing(mutant: Mutant) -> str:
    """Run the named tests on the broken copy; return the first that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "coterie" / mutant.file
        path.write_text(apply(mutant, path.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        marks = "slow or not slow" if "::" in mutant.test else "not slow"  # a test named is run
        command += ["-m", marks, str(ROOT / mutant.test)]
        environment = {**os.environ, "PYTHONPATH": str(source), "NUMBA_CACHE_DIR": scratch}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return f"`{failed[0].removeprefix('FAILED ').split(' - ')[0]}`" if failed else ""


if __name__ == "__main__":
    sys.exit(main())
