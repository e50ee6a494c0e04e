"""Your own torch module, trained with DPFedMTL: shared layers under a budget, a head per client."""

import torch
from torch import Tensor, nn

import coterie
from coterie.methods.dpfedmtl import DPFedMTL


class Net(nn.Module):
    """Convolutions for images of 8 x 8, dropout, and a head for ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each digit, for rows of 64 pixels."""
        return self.head(self.drop(torch.flatten(self.encoder(x.reshape(-1, 1, 8, 8)), 1)))


train, test = coterie.open_named("digits").split(0.2, seed=0)
method = DPFedMTL(model=Net, head="head", sgd=coterie.SGD(lr=0.3, epochs=2), head_epochs=10)
plan = coterie.Plan(
    method=method,
    privacy=coterie.Privacy(epsilon=8.0),
    sampler=coterie.Everyone(),
    rounds=3,
    simulation_seed=0,  # repeatable, and no protection: leave it out for real clients
)
outcome = coterie.simulate(plan, train)
print(outcome.guarantee.statement())
print("accuracy", round(coterie.evaluate(method.model, outcome.rows, test).value, 3))
