"""A small network trained on drawn characters, and its features in public order.

The last hidden layer is rotated to the principal directions of *drawn* images and divided by public
constants: each feature by the geometric mean of its own standard deviation and that of all. So
feature 1 varies most and all have size about 1. The network's last layer, rotated and scaled with
them, is the public head.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from public_features.glyphs import CLASSES, Style, fields, font_files, normalise, render

FEATURES = 96
_BATCH = 128
_RATE = 3e-3
_DRAWN = 6000  # images for the directions


class Network(nn.Module):
    """Three convolutions, a hidden layer and a head of 62 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.25)),
        )
        self.hidden = nn.Linear(64 * 9 + 2, FEATURES)
        self.head = nn.Linear(FEATURES, len(CLASSES))

    def features(self, ink: Tensor) -> Tensor:
        """Return the hidden layer of images, 0 for paper and 1 for ink."""
        fitted, box = normalise(ink)
        return torch.tanh(self.hidden(torch.cat([self.layers(fitted[:, None]), box], dim=1)))


class PublicMap(nn.Module):
    """Map images as LEAF stores them (1 for paper, 0 for ink) to features in public order."""

    def __init__(self, network: Network, drawn: Tensor) -> None:
        super().__init__()
        self.network = network
        with torch.no_grad():
            hidden = network.features(drawn).double()
        middle = hidden.mean(dim=0)
        _, sizes, directions = torch.linalg.svd(hidden - middle, full_matrices=False)
        deviations = sizes / len(hidden) ** 0.5
        scales = (deviations * deviations.square().mean().sqrt()).sqrt()
        self.register_buffer("middle", middle.float())
        self.register_buffer("turn", (directions.T / scales).float())
        back = directions.T * scales
        weight, bias = network.head.weight.detach().double(), network.head.bias.detach().double()
        self.head = {"weight": (weight @ back).float(), "bias": (bias + weight @ middle).float()}

    def forward(self, rows: Tensor) -> Tensor:
        """Return the features of rows (n, 28, 28)."""
        return (self.network.features(1 - rows) - self.middle) @ self.turn


def public_map(
    seed: int, steps: int, cache: Path, tell: Callable[[str], None] = lambda line: None
) -> PublicMap:
    """Train the network, or load it from the cache of the same code and seed."""
    path = cache / f"{_fingerprint(seed, steps)}.npz"
    network = Network()
    if path.exists():
        with np.load(path) as kept:
            network.load_state_dict({name: torch.from_numpy(kept[name]) for name in kept.files})
        tell(f"seed {seed}: network from {path}")
    else:
        network = trained(seed, steps, tell)
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        with unfinished.open("wb") as file:
            np.savez(file, **{name: leaf.numpy() for name, leaf in network.state_dict().items()})
        unfinished.replace(path)
    network.eval()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (_DRAWN,), generator=generator)
    return PublicMap(network, render(labels, Style.draw(_DRAWN, generator), generator, fields()))


def trained(seed: int, steps: int, tell: Callable[[str], None]) -> Network:
    """Train on images that are drawn anew for every step."""
    torch.manual_seed(seed)
    network, generator, drawn = Network(), torch.Generator().manual_seed(seed), fields()
    optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=1e-2)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps, pct_start=0.1)
    right = 0.0
    for step in range(1, steps + 1):
        labels = torch.randint(len(CLASSES), (_BATCH,), generator=generator)
        images = render(labels, Style.draw(_BATCH, generator), generator, drawn)
        scores = network.head(network.features(images))
        optimiser.zero_grad()
        functional.cross_entropy(scores, labels, label_smoothing=0.05).backward()
        optimiser.step()
        rates.step()
        right += float((scores.argmax(dim=1) == labels).float().mean())
        if step % 200 == 0:
            tell(f"seed {seed}: step {step} of {steps}, {right / 200:.3f} of drawn images right")
            right = 0.0
    return network


def _fingerprint(seed: int, steps: int) -> str:
    """Return a hash of what determines the network: this code, the fonts and the seed."""
    digest = hashlib.sha256(f"{seed} {steps} {torch.__version__}".encode())
    here = Path(__file__).parent
    for path in (here / "glyphs.py", here / "network.py", *font_files()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
