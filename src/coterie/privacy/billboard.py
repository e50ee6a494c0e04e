"""The billboard: the only interface between clients and everybody else.

Clients hand over a `Bounded` (clipped, under local noise perturbed, and summed inside `bound`). The
server can only release it: charge the ledger, add, perturb, store. The result is a `Post`, the only
input of `server_update`. A sum that was received as plain numbers enters through `admit`, which
validates it. Both types carry a seal that exists only in this file, as an `InitVar`, so that
neither a constructor nor `dataclasses.replace` can make one. Python cannot stop a determined
author; the contract tests check the rest.

**Guarantee (billboard lemma; Hsu, Huang, Roth, Roughgarden, Wu 2016):** if everything posted is
(epsilon, delta)-DP in each client's data, and client i's model is a function of client i's own data
and the releases, then the vector of all other clients' models is (epsilon, delta)-DP in client i's
data, against all others together. This file ensures the first premise, a contract test
(tests/contracts/) the second.
"""

import math
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.ranks import Ranks
from coterie.core.tree import Tree, add, map_arrays, to
from coterie.privacy.entropy import DrawnAhead, Entropy
from coterie.privacy.events import Event
from coterie.privacy.ledger import Ledger, OverspentError
from coterie.privacy.mechanisms import ClientEntropy, Mechanism, Past, Shapes, is_on_gpu
from coterie.privacy.transcript import FolderTranscript, Transcript
from coterie.privacy.validation import Verdict, fold, validate

_SEAL = object()


class ForgedError(TypeError):
    """Raised when a sealed value is made outside the billboard."""


def _check(seal: object, kind: str, maker: str) -> None:
    if seal is not _SEAL:
        raise ForgedError(f"only {maker} makes a {kind}; it cannot be built or copied by hand")


@dataclass(frozen=True, eq=False)
class Bounded:
    """A sum of bounded contributions on its way to the server; adds to its like."""

    total: Tree
    mechanism: Mechanism
    marks: frozenset[int] = frozenset()
    seal: InitVar[object] = None

    def __post_init__(self, seal: object) -> None:
        _check(seal, "Bounded", "bound() or admit()")

    def __init_subclass__(cls) -> None:
        raise ForgedError("only bound() makes a Bounded; it cannot be subclassed")

    def __add__(self, other: "Bounded") -> "Bounded":
        if self.mechanism != other.mechanism:
            raise ValueError("contributions bounded by different mechanisms cannot be added")
        _check_once(self.marks, other.marks)
        marks = self.marks | other.marks
        return Bounded(add(self.total, other.total), self.mechanism, marks, _SEAL)


@dataclass(frozen=True, eq=False)
class Post:
    """A released value, charged to the ledger; it is public.

    `radius` is about the largest entry of the noise (0 without noise): see `Mechanism.radius`.
    `deviations` are the standard deviations of the noise of a number, by leaf: public numbers, 0
    without noise; the largest in a leaf of second moments. Under local noise they are those of an
    expected cohort.
    """

    value: Tree
    index: int
    event: Event
    cohort: float
    radius: float = 0.0
    deviations: Mapping[str, float] = field(default_factory=dict)
    seal: InitVar[object] = None

    def __post_init__(self, seal: object) -> None:
        _check(seal, "Post", "Billboard.post()")

    @property
    def deviation(self) -> float:
        """The one standard deviation of all numbers; not-a-number where leaves differ."""
        first, *others = self.deviations.values() or (math.nan,)
        return first if all(other == first for other in others) else math.nan

    @cached_property
    def mean(self) -> Tree:
        """The sum over the *expected* cohort, a public number, in float32."""
        if is_on_gpu(self.value):
            leaves = list(self.value.values())
            # A tensor: a GPU multiplies by the reciprocal of a number, which rounds differently.
            over = torch.full((), self.cohort, dtype=torch.float64, device=leaves[0].device)
            made = [torch.empty_like(leaf, dtype=torch.float32) for leaf in leaves]
            torch._foreach_copy_(made, torch._foreach_div(leaves, over))
            return dict(zip(self.value, made, strict=True))
        means = {name: leaf.numpy() / self.cohort for name, leaf in self.value.items()}
        return map_arrays({name: mean.astype(np.float32) for name, mean in means.items()})

    @property
    def device(self) -> torch.device:
        """Where the value is: on the CPU, or on the GPU that made it, until it is read again."""
        return next((leaf.device for leaf in self.value.values()), torch.device("cpu"))

    def on(self, device: torch.device | str) -> "Post":
        """Return the same release on a device."""
        if self.device == torch.device(device):
            return self
        named = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "seal"}
        return Post(**{**named, "value": to(self.value, device)}, seal=_SEAL)


def _check_once(seen: AbstractSet[int], marks: AbstractSet[int]) -> None:
    if not seen.isdisjoint(marks):
        # The same part twice has twice the sensitivity that the noise is calibrated for.
        raise ValueError("the same contribution was given twice; it counts once in a release")


def bound(
    mechanism: Mechanism,
    rows: Tree,
    ids: Tensor | None = None,
    entropy: ClientEntropy | None = None,
) -> tuple[Bounded, Tensor]:
    """Return the sum of the clients' clipped contributions: the last step on the client's side.

    Return the factor kept of each stacked row, too: it is private to the clients. Under local noise
    each client's contribution gets noise of its own first; under noise in shares the sum gets each
    client's share. Then `ids` and `entropy`, which opens the source of a client's noise (see
    `entropy.client_entropy`), must be given, or ValueError is raised. Mechanisms with a row for
    each client need `ids` as well.
    """
    if mechanism.local and (ids is None or entropy is None):
        raise ValueError(
            "clients add the noise themselves under this mechanism: give their ids and "
            "entropy = client_entropy(seed, round)"
        )
    total, kept = mechanism.sum_bounded(rows, ids, entropy)
    if mechanism.in_shares:
        total = _with_shares(mechanism, total, ids, entropy)
    return _sealed(mechanism, total), kept


def absent_shares(
    mechanism: Mechanism, template: Shapes, ids: Tensor, entropy: ClientEntropy
) -> Bounded:
    """Return the shares of noise of clients that are not in the cohort, as a sum of zeros."""
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in template.items()}
    return _sealed(mechanism, _with_shares(mechanism, zeros, ids, entropy))


def _with_shares(
    mechanism: Mechanism, total: Tree, ids: Tensor | None, entropy: ClientEntropy | None
) -> Tree:
    if ids is None or entropy is None:
        raise ValueError(
            "clients add shares of the noise under this mechanism: give their ids and "
            "entropy = client_entropy(seed, round)"
        )
    return mechanism.add_shares(total, ids, entropy)


def _sealed(mechanism: Mechanism, total: Tree) -> Bounded:
    return Bounded(total, mechanism, frozenset([secrets.randbits(64)]), _SEAL)


def admit(
    mechanism: Mechanism,
    arrays: Mapping[str, NDArray[np.float64]],
    ids: NDArray[np.int64],
    template: Shapes,
) -> tuple[Bounded, Verdict]:
    """Return a site's sum that was received as plain numbers, validated, and what was changed.

    `ids` are the site's clients in this round, `template` has the shapes of one client's
    contribution. An honest sum is unchanged. Raise ValueError if names, shapes or types are not
    those of the mechanism's sums.

    **Guarantee:** releases stay as private as the ledger states for clients of honest sites,
    whatever this site sends: see `coterie.privacy.validation`. Tests:
    tests/properties/test_validation.py.
    """
    held, verdict = validate(mechanism, _arrived(mechanism, arrays, template), ids)
    return _sealed(mechanism, held), verdict


def admit_sum(
    mechanism: Mechanism,
    arrays: Mapping[str, NDArray[np.float64]],
    ids: NDArray[np.int64],
    template: Shapes,
) -> Bounded:
    """Return a sum over sites, out of secure aggregation, folded into its bounds.

    What was changed depends on honest contributions without noise, and is not reported. Raise
    ValueError if arrays are not such a sum, or the mechanism has none: see `validation.fold`.

    **Guarantee:** as `admit`, whatever hostile sites put into the sum, provided that `ids` do not
    depend on the cohort: give *all* clients of the sites in the sum.
    """
    return _sealed(mechanism, fold(mechanism, _arrived(mechanism, arrays, template), ids))


def _arrived(
    mechanism: Mechanism, arrays: Mapping[str, NDArray[np.float64]], template: Shapes
) -> Tree:
    expected = {name: tuple(shape) for name, shape in mechanism.totals(template).items()}
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if shapes != expected:
        raise ValueError(f"a sum arrived with shapes {shapes}, expected {expected}")
    odd = [f"{name} of {a.dtype}" for name, a in arrays.items() if a.dtype != np.float64]
    if odd:
        raise ValueError(f"a sum arrived with {', '.join(odd)}: expected float64")
    return map_arrays({name: np.array(arrays[name]) for name in expected})


class Billboard:
    """Posts a plan's releases in order, each charged before it exists.

    There is one mechanism per round. `template` has the shapes of an unstacked contribution,
    `cohort` is the expected one, the public denominator; `entropy` opens the noise source of a
    release's index, and `repeats` says that it returns the same words again, as it does with a
    seed: then noise that depends on earlier noise survives a crash.
    """

    def __init__(
        self,
        *,
        mechanisms: Sequence[Mechanism],
        template: Tree,
        cohort: float,
        ledger: Ledger,
        transcript: Transcript,
        entropy: Callable[[int], Entropy],
        repeats: bool = False,
    ) -> None:
        self._mechanisms = tuple(mechanisms)
        self._template = {name: tuple(leaf.shape) for name, leaf in template.items()}
        self._cohort = cohort
        self._ledger = ledger
        self._transcript = transcript
        self._entropy = entropy
        self._posting = threading.Lock()
        self._past: Past = ()
        try:
            for mechanism in dict.fromkeys(self._mechanisms):
                mechanism.totals(self._template)  # raises for a contribution of another shape
            if tuple(mechanism.event() for mechanism in self._mechanisms) != ledger.events:
                raise ValueError(
                    "the ledger's events are not those of the mechanisms; make both from one plan"
                )
            self._settle_account()
            if repeats:
                self._past = self._drawn_again()
        except Exception:
            ledger.close()
            raise

    @property
    def ledger(self) -> Ledger:
        """The account."""
        return self._ledger

    @property
    def next(self) -> int:
        """The index of the first release that does not exist."""
        return len(self._ledger.released)

    def mechanism(self, index: int) -> Mechanism:
        """Return the mechanism of a round."""
        return self._mechanisms[index]

    def shapes(self, index: int) -> Shapes:
        """Return the shapes of a round's sum, by leaf."""
        return self._mechanisms[index].totals(self._template)

    def read(self, index: int) -> Post:
        """Read a release."""
        if index not in self._ledger.released:
            raise KeyError(f"release {index} does not exist; {self.next} releases do")
        return self._seal(index, self._transcript.read(index))

    @property
    def posts(self) -> tuple[Post, ...]:
        """The public transcript."""
        return tuple(self.read(index) for index in range(self.next))

    def pack(self) -> None:
        """Pack the releases of a finished run into one file."""
        if isinstance(self._transcript, FolderTranscript):
            self._transcript.pack()

    @contextmanager
    def charged(self, index: int, device: torch.device | str = "cpu") -> Iterator["Release"]:
        """Charge a release, durably, and open it for contributions until the block ends.

        Sums and noise that kernels on `device` make stay there until they are stored.

        A block that fails, or ends without `publish`, leaves the release charged and unpublished:
        it is made again later under the same charge. Raise OverspentError if the plan has no such
        release, or it is published already.
        """
        if not self._posting.acquire(blocking=False):
            raise RuntimeError("a release is being made already; make one after another")
        try:
            if index != self.next or self._transcript.has(index):
                raise OverspentError(
                    f"release {index} was asked for, but release {self.next} is next, or its value "
                    "was written before the ledger recorded it: a release is never made twice; "
                    "reopen the run"
                )
            self._ledger.charge(index)
            release = Release(self, index, torch.device(device))
            try:
                yield release
            finally:
                release.close()
        finally:
            self._posting.release()

    def post(self, parts: Iterable[Bounded]) -> Post:
        """Charge the next release, add the parts, perturb and publish their sum.

        An empty cohort publishes noise and is charged like any other.
        """
        with self.charged(self.next) as release:
            for part in parts:
                release.add(part)
            return release.publish()

    def _opened(self, index: int, device: torch.device) -> tuple[Mechanism, Shapes, Entropy | None]:
        """Return mechanism, shapes, and the source of noise if it is drawn on the CPU."""
        mechanism = self._mechanisms[index]
        shapes = mechanism.totals(self._template)
        if mechanism.fused_on(device, shapes):
            return mechanism, shapes, None
        entropy, draws = self._entropy(index), mechanism.draws(shapes)
        return mechanism, shapes, DrawnAhead(entropy, draws) if draws else entropy

    def _perturbed(self, index: int, total: Tree, entropy: Entropy | None) -> tuple[Tree, Past]:
        entropy = entropy or self._entropy(index)
        return self._mechanisms[index].perturb_after(total, entropy, self._past)

    def _publish(self, post: Post, past: Past) -> Post:
        self._ledger.release(post.index, self._transcript.write(post.index, post.value))
        self._past = past  # noise that was not released is forgotten
        return post

    def _drawn_again(self) -> Past:
        """Return what noise needs of that of earlier releases, from a source that repeats."""
        past: Past = ()
        for index in range(self.next):
            mechanism, shapes = self._mechanisms[index], self.shapes(index)
            if not mechanism.correlated:
                continue
            zeros = {
                name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()
            }
            past = mechanism.perturb_after(zeros, self._entropy(index), past)[1]
        return past

    def _seal(self, index: int, value: Tree) -> Post:
        mechanism = self._mechanisms[index]
        totals = mechanism.totals(self._template)
        radius, deviations = mechanism.radius(totals), mechanism.standard_deviations(totals)
        return Post(value, index, mechanism.event(), self._cohort, radius, deviations, _SEAL)

    def _settle_account(self) -> None:
        ledger, transcript = self._ledger, self._transcript
        if not isinstance(transcript, FolderTranscript):
            return
        unknown = transcript.indices() - ledger.charged
        if unknown:
            raise ValueError(
                f"{transcript.folder} holds releases {sorted(unknown)[:5]} that the ledger never "
                "charged; the ledger was lost or altered: start a new run"
            )
        # A crash between a release's rename and its line in the ledger: it counts as released
        # and is never repeated.
        for index in sorted(ledger.charged - set(ledger.released)):
            if transcript.has(index):
                ledger.release(index, transcript.digest(index))
        for index, digest in ledger.released.items():
            if not transcript.has(index) or transcript.digest(index) != digest:
                raise ValueError(
                    f"{transcript.folder}: release {index} is missing or altered; "
                    "the run cannot go on from it, start a new one"
                )


class Release:
    """A charged release that is not published yet; `Billboard.charged` makes it.

    `add` takes the contributions of the client's half; `publish` adds noise and writes the value,
    once. Both refuse after the block of `charged` has ended.
    """

    def __init__(self, billboard: Billboard, index: int, device: torch.device) -> None:
        self.index = index
        self._billboard: Billboard | None = billboard
        self.mechanism, self._shapes, self._entropy = billboard._opened(index, device)
        # NumPy, on one thread: torch would wake its threads for each of these small sums.
        self._total = {name: np.zeros(shape) for name, shape in self._shapes.items()}
        self._there: Tree | None = None  # the sum of parts that are on a GPU
        self._ready: tuple[Post, Past] | None = None
        self._is_here = False
        self._seen: set[int] = set()

    def add(self, part: Bounded) -> None:
        """Add a bounded sum of contributions; refuse one of another mechanism, or given twice."""
        self._opened(to_add=True)
        self._check(part)
        _check_once(self._seen, part.marks)
        self._seen |= part.marks
        if is_on_gpu(part.total):
            self._there = part.total if self._there is None else add(self._there, part.total)
            return
        self._is_here = True
        for name, total in self._total.items():
            np.add(total, part.total[name].numpy(), out=total)

    def combine(self, ranks: Ranks) -> None:
        """Add the sums that other processes of this run hold, each of its own clients.

        **Guarantee:** a client belongs to one process, so its contribution is in the sum once.
        Assumes that the processes are one trusted simulation, see `coterie.core.ranks`; sites of a
        deployment are not, and their sums enter through `admit`.
        """
        self._opened(to_add=ranks.size > 1)
        if ranks.size > 1:
            found = ranks.add(self._sum("cpu"))
            self._total = {name: leaf.numpy() for name, leaf in found.items()}
            self._there, self._is_here = None, True

    def perturb(self) -> None:
        """Add the noise; nothing may be added to the sum any more.

        The result stays in here until `publish`, and is forgotten without it. A GPU begins with its
        mean at once, so that it does not wait for the host after `publish`.
        """
        if self._ready is None:
            billboard = self._opened()
            value, past = billboard._perturbed(self.index, self._sum(), self._entropy)
            post = billboard._seal(self.index, value)
            if is_on_gpu(value):
                _ = post.mean
            self._ready = post, past

    def publish(self) -> Post:
        """Publish the sum with its noise: from here on it is public."""
        billboard = self._opened()
        self.perturb()
        ready = self._ready
        assert ready is not None
        self.close()
        return billboard._publish(*ready)

    def _sum(self, device: str = "") -> Tree:
        """Return the sum so far; on the GPU if all parts are there, unless a device is given."""
        here = map_arrays(self._total)
        if self._there is None:
            return here
        there = {name: self._there[name] for name in self._shapes}
        if device or self._is_here:
            return add(here, to(there, "cpu"))
        return there

    def close(self) -> None:
        """Refuse further contributions, and forget noise that was not published."""
        self._billboard = self._ready = None

    def _opened(self, to_add: bool = False) -> Billboard:
        if self._billboard is None:
            raise RuntimeError(f"release {self.index} is closed: it is published once")
        if to_add and self._ready is not None:
            raise RuntimeError(f"release {self.index} has its noise: no part may be added")
        return self._billboard

    def _check(self, part: Bounded) -> None:
        if type(part) is not Bounded:
            raise ForgedError(f"expected a Bounded made by bound(), got {type(part).__name__}")
        if part.mechanism != self.mechanism:
            raise ValueError(
                f"a contribution was bounded by {part.mechanism}, this round releases through "
                f"{self.mechanism}; bound it with the plan's mechanism of this round"
            )
        shapes = {name: tuple(leaf.shape) for name, leaf in part.total.items()}
        if shapes != dict(self._shapes):
            raise ValueError(f"a contribution has shapes {shapes}, expected {dict(self._shapes)}")
