"""What the methods around one local problem have in common; no method itself.

min_w  mean over own rows of loss(w) + lam/2 |w - anchor|^2      (`solvers.local`)
"""

from dataclasses import replace
from typing import Any

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Method, Notes, Post, Rounds, Shape, check_numbers
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD


class Proximal(Method):
    """Clients solve the local problem near the shared model; the mean of changes is released.

    It declares no dataclass fields: a method has those of these settings that it lists.
    """

    shape = Shape.SUM
    lam: float = 0.0
    solver: How = "sgd"
    sgd: SGD
    last_epochs: int = 5
    step_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam=">= 0", last_epochs=">= 1", step_noise=">= 0")
        if self.step_noise and self.sgd.steps is None:
            raise ValueError(
                f"step_noise = {self.step_noise}: published steps are counted: give sgd.steps"
            )

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models that do not fit, and exact solves that do not exist."""
        super().check(spec, **given)
        self.problem().is_exact(spec)

    def problem(self) -> LocalProblem:
        """Return the local problem of a round."""
        return LocalProblem(model=self.model, how=self.solver, sgd=self.sgd, lam=self.lam)

    def rounds(self, spec: Spec) -> Rounds:
        """Return the usual rule; batches can be drawn ahead."""
        return replace(super().rounds(spec), ahead=self.problem().draw_ahead, on_device=True)

    def last_problem(self) -> LocalProblem:
        """Return the problem that every client solves after the last round, which is free."""
        problem = self.problem()
        return replace(problem, sgd=replace(problem.sgd, epochs=self.last_epochs, steps=None))

    def notes(self, **run: Any) -> Notes:
        """Return what the noise of published steps is not."""
        if not self.step_noise:
            return super().notes(**run)
        return Notes(
            caveats=(
                "As published; not a guarantee: local gradients have noise but are not clipped, so "
                "this noise has no epsilon.",
            )
        )

    def noisy_steps(
        self, models: Tree, layers: tuple[str, ...], clients: Clients, rng: Rng, round: int
    ) -> Tree:
        """Take the steps of Wu et al. (DPFedMTL): noise of the client's own on every gradient.

        `layers` are the shared leaves; only their gradients get noise, of deviation `step_noise`.
        Nothing is clipped, so this guarantees nothing.
        """
        one = replace(self.problem(), sgd=replace(self.sgd, steps=1))
        scale = self.sgd.rate(round) * self.step_noise
        for step in range(self.sgd.steps or 1):
            stream = rng.at("step", step)
            models = one.solve(models, clients, stream, round=round, anchor=None, keep_failed=True)
            models = {name: leaf.clone() for name, leaf in models.items()}
            for place, key in enumerate(stream.at("noise").keys(clients.ids)):
                own = Rng(int(key)).torch(clients.device)
                for name in layers:
                    row = models[name][place]
                    row -= scale * torch.randn(row.shape, generator=own, device=row.device)
        return models

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared model by the released mean."""
        return add(shared, post.mean)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Solve once more against the final shared model."""
        return self.last_problem().solve(personal, clients, rng, round=0, anchor=shared)
