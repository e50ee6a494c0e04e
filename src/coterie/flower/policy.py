"""A policy that a site enforces on any ClientApp of Flower, whatever app it receives.

`coterie deploy supernode --policy policy.toml -- ...` starts a SuperNode under it. The app is not
asked: every call of a ClientApp in the site's processes goes through `Policy.apply`.

    clip = 1.0               # l2 norm of an update: all arrays that are sent, less those received
    noise_multiplier = 8.0   # deviation of the noise that the site adds, over the clip
    rounds = 20              # answers to training messages, at most, over all runs
    epsilon = 4.0            # of the site's whole data, over all runs
    delta = 1e-5
    folder = "/srv/coterie/policy"   # the site's own account; `coterie verify` checks it
    metrics = "metrics"      # the name of the record of metrics that the strategy expects

- An update is clipped, rounded to a grid and gets Gaussian noise, as `GaussianSum` does.
- Every answer is charged before the app is called. Beyond `rounds` or `epsilon` the site refuses.
- Nothing else of the app leaves the site. Of metrics only `num-examples` is sent, as the constant
  1, in a record that the policy names: the number of rows stays at the site, and weights no mean,
  and no name is of the app's choice. Other records, messages other than
  for training, and the text of errors are not sent.

**Guarantee:** against everybody who sees all messages of the site, the server included: the
messages are (epsilon, delta)-DP in the site's whole data (zero_out: the updates are replaced by
zeros), for apps that are careless or wrong. An app that is hostile runs in the same process and
could undo the policy: against it the site needs a container (docs/deploy/threat-model.md). Assumes
that the folder is kept, and that neither the time of an answer nor its absence reveals rows.
Tests: tests/test_flower_policy.py.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.core.config import from_table, read_toml

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message

    from coterie.flower.accountant import CoterieAccountant

_WEIGHT = "num-examples"
App = Callable[["Message", "Context"], "Message"]


class PolicyError(RuntimeError):
    """Raised instead of an answer that the policy does not permit; Flower sends its text."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a site permits; see the module docstring."""

    clip: float
    noise_multiplier: float
    rounds: int
    epsilon: float
    folder: str
    delta: float = 1e-5
    metrics: str = "metrics"

    def __post_init__(self) -> None:
        for name in ("clip", "noise_multiplier", "epsilon", "rounds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)}: expected a number above 0")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta = {self.delta}: expected a number between 0 and 1")

    @classmethod
    def load(cls, path: Path) -> "Policy":
        """Return the policy in a TOML file."""
        return from_table(cls, read_toml(path), "policy")

    def account(self) -> "CoterieAccountant":
        """Return the site's account, with what it has spent."""
        from flwr.serverapp import NeighboringRelation, PrivacyConfig, SamplingMethod

        from coterie.flower.accountant import CoterieAccountant

        config = PrivacyConfig(
            target_delta=self.delta,
            population_size=1,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=self.epsilon,
        )
        return CoterieAccountant(config, os.path.expandvars(self.folder))

    def apply(self, message: "Message", context: "Context", app: App) -> "Message":
        """Return what an app answers, within the policy.

        Raises:
            PolicyError: If the message is not permitted, or the app fails.
        """
        from flwr.app import MetricRecord, RecordDict

        if message.metadata.message_type.split(".")[0] != "train":
            raise PolicyError("this site answers training messages only")
        (key, received) = _arrays(message, "the message")
        self._charge()
        try:
            reply = app(message, context)
            if reply.has_error():
                raise PolicyError("its answer is an error")
            sent = self._protect(received, _arrays(reply, "the answer")[1])
        except Exception as error:
            self._log(f"{type(error).__name__}: {error}")
            # Text and kind may tell about rows, and so may the errors that led to it.
            raise PolicyError("the app failed; why is in errors.log of the site") from None
        reply.content = RecordDict({key: sent, self.metrics: MetricRecord({_WEIGHT: 1})})
        return reply

    def _log(self, text: str) -> None:
        """Note an error for the site, in a file that only its user can read."""
        path = Path(os.path.expandvars(self.folder)) / "errors.log"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _charge(self) -> None:
        """Charge an answer, on disk, before it is computed."""
        from flwr.serverapp import GaussianPrivacyEvent

        account, event = self.account(), GaussianPrivacyEvent(self.noise_multiplier, 1, 1)
        if account.num_releases >= self.rounds:
            raise PolicyError(f"this site answers {self.rounds} training messages, and has")
        if account.would_exceed(event):
            raise PolicyError("the epsilon that this site permits is spent")
        account.compose(event)
        account.certify()

    def _protect(self, received: "ArrayRecord", sent: "ArrayRecord") -> "ArrayRecord":
        """Return the arrays that were received plus the clipped and noisy update."""
        import torch
        from flwr.app import Array, ArrayRecord

        from coterie.privacy.entropy import open_entropy
        from coterie.privacy.mechanisms import GaussianSum

        before = {name: array.numpy() for name, array in received.items()}
        after = {name: array.numpy() for name, array in sent.items()}
        if {n: a.shape for n, a in before.items()} != {n: a.shape for n, a in after.items()}:
            raise PolicyError("the app answered with other arrays than it received")
        rows = {
            name: torch.from_numpy(
                np.atleast_1d(after[name].astype(np.float64) - array.astype(np.float64))
            ).unsqueeze(0)
            for name, array in before.items()
        }
        mechanism = GaussianSum(self.clip, self.noise_multiplier)
        clipped, _ = mechanism.clip(rows)
        noisy = mechanism.perturb(mechanism.reduce(clipped), open_entropy(None, "policy", 0))
        found = {}
        for name, array in before.items():
            update = noisy[name].numpy().reshape(array.shape)
            found[name] = Array(np.asarray(array.astype(np.float64) + update, dtype=array.dtype))
        return ArrayRecord(found)


def _arrays(message: "Message", what: str) -> tuple[str, "ArrayRecord"]:
    found = list(message.content.array_records.items())
    if len(found) != 1:
        raise PolicyError(f"{what} has {len(found)} records of arrays: this site permits one")
    return found[0]


def enforce(path: Path) -> None:
    """Apply a policy to every ClientApp that is called in this process."""
    from flwr.clientapp import ClientApp

    policy, usual = Policy.load(path), ClientApp.__call__

    def guarded(self: Any, message: "Message", context: "Context") -> "Message":
        return policy.apply(message, context, lambda one, two: usual(self, one, two))

    ClientApp.__call__ = guarded  # type: ignore[method-assign]
