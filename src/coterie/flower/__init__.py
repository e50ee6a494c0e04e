"""For people who keep their own Flower app: an accountant for strategies, a policy for sites."""

from coterie.flower.accountant import CoterieAccountant
from coterie.flower.policy import Policy, PolicyError

__all__ = ["CoterieAccountant", "Policy", "PolicyError"]
