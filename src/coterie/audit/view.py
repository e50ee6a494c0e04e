"""What an attacker sees of one client of an MTL-SVM run: the threat model, as a type.

Two attackers are told apart, since the library protects against one of them and not the other:

- "server": whoever adds the contributions up. It sees each bounded contribution *before* noise.
  Central noise does not protect anybody from it; only secure aggregation, which is not part of this
  library, would.
- "others": all the other clients together, the worst case of what the guarantee speaks of. They see
  the posts, take off what they sent themselves, and are left with the target's contribution plus
  the noise of the post. Without noise (epsilon = inf) they see what the server sees.

Both see every shared w, and know the public settings: the step rule, the clip and the size of the
noise. Since v_k starts at 0 and moves by dw_k / C2, an attacker who sees dw_k knows v_k too
(Ponomarenko-Timofeev et al., section 6.1), unless what is sent is masked and the duals are not.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MaskKind = Literal["none", "step", "paper"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The public step rule of a client, hinge loss, u_i = y_i x_i.

    "simultaneous" moves all rows at once, as printed: from alpha_i to
    alpha_i + (1 - (w + v) . u_i) / (a |u_i|^2), a = sigma + 1/C2 (printed with sigma = 1), cut to
    [0, C1]. "serial" moves them one by one, in an order drawn anew in each pass, with w + v + a dw
    for w + v: the library's safe steps.

    Attributes:
        c1: The box; infinity for the step as printed, which has none (alpha may be negative too).
        c2: What being different costs.
        sigma: How many clients' steps a step must leave room for.
        steps: "serial" or "simultaneous".
        passes: Passes over the rows in a round, of serial steps.
    """

    c1: float = 1.0
    c2: float = 1.0
    sigma: float = 1.0
    steps: Literal["serial", "simultaneous"] = "serial"
    passes: int = 1

    def __post_init__(self) -> None:
        for name in ("c1", "c2", "sigma", "passes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected a positive number")
        if self.steps not in ("serial", "simultaneous"):
            raise ValueError(f"steps = {self.steps!r}: expected 'serial' or 'simultaneous'")

    @property
    def slope(self) -> float:
        """The factor a = sigma + 1/C2 of |x|^2 in the denominator of a step."""
        return self.sigma + 1 / self.c2


@dataclass(frozen=True, kw_only=True)
class View:
    """What an attacker sees of one client over T rounds of D numbers.

    Make it with `View.server`, and from that `others`.

    Attributes:
        kind: "server" or "others".
        shared: w before each round, (T, D).
        messages: What is seen of the client's contribution to each round, (T, D).
        rule: The public step rule.
        clip: The bound on a contribution; None where there is none.
        noise: Standard deviation of the noise on each number of a message; 0 for a server.
        mask: "none"; "step", where dual steps are masked; "paper", where what is sent alone is, so
            that v is not known.
        rows: How many rows the client has, where that is known.
    """

    kind: Literal["server", "others"]
    shared: Array
    messages: Array
    rule: Rule
    clip: float | None = None
    noise: float = 0.0
    mask: MaskKind = "none"
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("server", "others"):
            raise ValueError(f"kind = {self.kind!r}: expected 'server' or 'others'")
        if self.shared.ndim != 2 or self.shared.shape != self.messages.shape:
            raise ValueError(
                f"shared is {self.shared.shape} and messages are {self.messages.shape}: expected "
                "(rounds, features) of both"
            )
        if self.kind == "server" and self.noise:
            raise ValueError(
                f"noise = {self.noise}: a server sees contributions before noise; see `others`"
            )

    @classmethod
    def server(
        cls,
        shared: Array,
        contributions: Array,
        rule: Rule,
        *,
        clip: float | None = None,
        mask: MaskKind = "none",
        rows: int | None = None,
    ) -> "View":
        """See the client's own bounded contributions, before noise."""
        return cls(
            kind="server",
            shared=shared,
            messages=contributions,
            rule=rule,
            clip=clip,
            mask=mask,
            rows=rows,
        )

    def others(self, posts: Array, sent: Array, *, noise: float = 0.0) -> "View":
        """Return what all other clients together see of a run of which this is the server's view.

        Args:
            posts: The posts, (T, D).
            sent: What they sent themselves, added up, (T, D).
            noise: The standard deviation of the noise on each number of a post.
        """
        return replace(self, kind="others", messages=posts - sent, noise=noise)

    @property
    def starts(self) -> Array:
        """W + v before each round, with v from the messages: exact if they are what moved v."""
        before = np.cumsum(self.messages, axis=0) - self.messages
        return self.shared + before / self.rule.c2

    @property
    def ends(self) -> Array:
        """W + v + a dw after each round's steps: where the last row that moved has margin 1."""
        return self.starts + self.rule.slope * self.messages

    @property
    def uncut(self) -> NDArray[np.bool_]:
        """The rounds with a message that the clip did not shorten, and that is not rounding."""
        size = np.linalg.norm(self.messages, axis=1)
        heard: NDArray[np.bool_] = size > 1e-6 * size.max(initial=0.0)
        # A mechanism leaves a little room below its clip for rounding.
        return heard if self.clip is None else heard & (size < 0.99 * self.clip)
