"""Releases that a GPU makes against those of the CPU, cell by cell: in Triton's interpreter without
a GPU, and on CUDA."""

import os
import subprocess
import sys
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from coterie.privacy.billboard import Billboard, bound
from coterie.privacy.entropy import client_entropy, open_entropy
from coterie.privacy.ledger import Ledger
from coterie.privacy.mechanisms import (
    Exact,
    GaussianRows,
    GaussianSum,
    LocalGaussianSum,
    facts_of,
)
from coterie.privacy.transcript import MemoryTranscript

SHAPES = {"w": (7, 11), "b": (3,), "a": (2, 5, 3)}
MECHANISMS = [
    GaussianSum(0.5, 1.0),
    GaussianSum(3.0, 1e-3),
    GaussianSum(0.5, 1e4),  # releases are rounded to a coarser grid
    LocalGaussianSum(0.7, 1.3, cohort=9.0),
    LocalGaussianSum(0.7, 900.0, cohort=9.0),
    GaussianRows(0.5, 1.0, 20),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def rows_of(clients, seed=0):
    """Rows far below and far above every bound, and two that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.linspace(-5, 2, clients)
    rows = {}
    for name, shape in SHAPES.items():
        leaf = torch.randn(clients, *shape, generator=generator)
        rows[name] = leaf * sizes.reshape(-1, *[1] * len(shape))
    rows["w"][2, 0, 0], rows["b"][4, 1] = torch.nan, torch.inf
    return rows


def releases(mechanism, device, rows, posts=2):
    """Return some releases of rows, in two blocks of clients, and the factors kept."""
    board = Billboard(
        mechanisms=[mechanism] * posts,
        template={name: torch.zeros(shape) for name, shape in SHAPES.items()},
        cohort=9.0,
        ledger=Ledger([mechanism.event()] * posts),
        transcript=MemoryTranscript(),
        entropy=partial(open_entropy, 7, "noise"),
    )
    clients = len(rows["b"])
    ids, found, factors = torch.arange(clients) * 2, [], []
    for number in range(posts):
        with board.charged(number, device) as release:
            for block in (slice(0, 5), slice(5, clients)):
                mine = {name: leaf[block].to(device) for name, leaf in rows.items()}
                part, kept = bound(mechanism, mine, ids[block], client_entropy(5, number))
                release.add(part)
                factors.append(kept.cpu())
            post = release.publish()
        found.append((post, board.read(number)))
    return found, torch.cat(factors)


def assert_equal(here, there):
    """Compare all bits, the sign of zero included."""
    for (post, read), (other, again) in zip(here[0], there[0], strict=True):
        for name in SHAPES:
            wanted = read.value[name].numpy()
            for found in (other.value[name].cpu(), again.value[name]):
                assert found.numpy().tobytes() == wanted.tobytes()
            assert torch.equal(other.mean[name].cpu(), post.mean[name])
    torch.testing.assert_close(here[1], there[1], rtol=1e-14, atol=0)


def check_neighbours(device, mechanism, numbers=130):
    """One client moves a sum by at most the bound, in whole numbers, whatever its row holds."""
    from coterie.privacy import sums_gpu

    facts = facts_of(mechanism, numbers)
    generator = np.random.default_rng(3)
    others = generator.standard_normal((3, numbers)).astype(np.float32)
    line = np.ones(numbers, np.float32)
    rows = [
        line * size for size in (0.0, 1e-45, 1e-8, 0.3, 1.0, 1e30, 3.4e38, np.nan, np.inf, -np.inf)
    ]
    spiked = others[0] * 1e-6
    spiked[7] = 3e38
    norm = float(np.linalg.norm(others[1].astype(np.float64)))
    rows += [spiked, others[1] * (mechanism.bound / norm), generator.permutation(others[2] * 1e3)]
    limit = Fraction(mechanism.bound) / Fraction(facts.step)
    for row in rows:
        both = []
        for first in (row, np.zeros_like(row)):  # zero_out
            stacked = torch.from_numpy(np.stack([first, *others])).to(device)
            both.append(sums_gpu.sum_rows(stacked, facts)[0].cpu().numpy() / facts.step)
        assert all((found == np.rint(found)).all() for found in both)
        moved = [int(a) - int(b) for a, b in zip(*both, strict=True)]
        assert sum(step * step for step in moved) <= limit**2
        if not np.isfinite(row).all():
            assert not any(moved)


def check_in_the_interpreter():
    """Compare with tensors of the CPU that pass for those of a GPU; in a process of its own."""
    from coterie.privacy import billboard, mechanisms, sums_gpu

    cpu = torch.device("cpu")
    assert sums_gpu.differing(cpu, 11, 70) == ""
    for mechanism in MECHANISMS[:2]:
        check_neighbours(cpu, mechanism)
    for mechanism in MECHANISMS:
        rows = rows_of(9)
        here = releases(mechanism, cpu, rows)
        with pytest.MonkeyPatch.context() as patch:
            for module in (mechanisms, billboard):
                patch.setattr(module, "is_on_gpu", lambda tree: True)
            patch.setattr(GaussianSum, "fused_on", lambda *given: True)
            patch.setattr(GaussianSum, "clip", None)  # nothing of the path on the CPU is used
            assert_equal(here, releases(mechanism, cpu, rows))


@pytest.mark.slow
def test_the_kernels_make_the_same_releases_in_the_interpreter():
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = "import test_sums_gpu; test_sums_gpu.check_in_the_interpreter()"
    folder = os.path.dirname(__file__)
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=folder)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_gpu_makes_the_same_releases(mechanism):
    pytest.importorskip("triton")
    for seed in range(20):
        rows = rows_of(23 if mechanism.rows == 0 else 10, seed)
        there = releases(mechanism, torch.device("cuda"), rows)
        assert there[0][0][0].value["w"].is_cuda  # a fall-back would pass for any reason
        assert_equal(releases(mechanism, torch.device("cpu"), rows), there)


def test_sums_without_noise_that_stay_are_those_that_move(monkeypatch):
    from coterie.privacy import billboard, mechanisms

    cpu, rows = torch.device("cpu"), rows_of(9)
    here = releases(Exact(), cpu, rows)
    for module in (mechanisms, billboard):
        monkeypatch.setattr(module, "is_on_gpu", lambda tree: True)
    monkeypatch.setattr(mechanisms, "sum_rows", None)
    assert_equal(here, releases(Exact(), cpu, rows))


@pytest.mark.gpu
@needs_cuda
def test_sums_without_noise_stay_on_a_gpu():
    rows = rows_of(9)
    there = releases(Exact(), torch.device("cuda"), rows)
    for (post, _), (other, _) in zip(releases(Exact(), "cpu", rows)[0], there[0], strict=True):
        assert other.value["w"].is_cuda
        for name in SHAPES:
            torch.testing.assert_close(other.mean[name].cpu(), post.mean[name])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mechanism", MECHANISMS[:4])
@pytest.mark.parametrize("numbers", [130, 20_001])
def test_one_client_moves_a_sum_on_a_gpu_by_at_most_the_bound(mechanism, numbers):
    pytest.importorskip("triton")
    check_neighbours(torch.device("cuda"), mechanism, numbers)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("clients", [1, 8, 9, 130])
@pytest.mark.parametrize("numbers", [1, 4, 4099, 115_646])
def test_a_gpu_makes_the_same_sums(clients, numbers):
    pytest.importorskip("triton")
    from coterie.privacy import sums_gpu

    assert sums_gpu.differing(torch.device("cuda"), max(clients, 9), numbers) == ""


def test_other_mechanisms_and_devices_are_not_fused():
    class Derived(GaussianSum):
        """A mechanism of somebody else."""

    shapes = {"w": (3,)}
    assert not GaussianSum(1.0, 1.0).fused_on(torch.device("cpu"), shapes)
    assert not Derived(1.0, 1.0).fused_on(torch.device("cuda"), shapes)


def test_a_release_on_the_cpu_is_what_it_was():
    # An oracle of its own: the grid sum by whole numbers, the noise by `normals`.
    from coterie.privacy.entropy import normals

    mechanism, rows = GaussianSum(0.5, 1.0), rows_of(9)
    clipped, _ = mechanism.clip(rows)
    found, _ = releases(mechanism, torch.device("cpu"), rows, posts=1)
    drawn = normals(open_entropy(7, "noise", 0), 110)
    step, used = mechanism.step(110), 0
    for name in sorted(SHAPES):
        whole = (clipped[name].numpy() / step).astype(np.int64).sum(axis=0)
        noise = np.rint(drawn[used : used + whole.size] * (0.5 / step)).astype(np.int64)
        used += whole.size
        released = found[0][1].value[name].numpy()
        assert np.array_equal(released, (whole + noise.reshape(whole.shape)) * step)
