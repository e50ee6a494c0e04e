"""The key stream against RFC 8439 and the package cryptography, its normals against other people's
inverse functions and exact probabilities, and the GPU against the CPU, bit by bit."""

import hashlib
import math
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy.special import ndtri

from coterie.privacy import chacha
from coterie.privacy.billboard import bound
from coterie.privacy.entropy import (
    SeededEntropy,
    SystemEntropy,
    client_entropy,
    draw_keys,
    normals,
)
from coterie.privacy.mechanisms import LocalGaussianSum, normals_on

# RFC 8439, appendix A.1, test vectors 1 to 4: those with nonce 0.
RFC_8439 = [
    (
        "00" * 32,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
KEYS = draw_keys([SeededEntropy(4, "noise", index) for index in range(3)])


def from_bytes(key):
    return np.frombuffer(key, dtype="<u4")


def other_stream(key, blocks):
    cipher = Cipher(algorithms.ChaCha20(key.tobytes(), bytes(16)), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(64 * blocks)), dtype="<u4")


def other_normals(key, count):
    """From whole numbers of 128 bits, by scipy."""
    words = other_stream(key, -(-count // 4)).reshape(-1, 4).tolist()[:count]
    found = []
    for a, b, c, d in words:
        first, finer = a | b << 32, c | d << 32
        tail = ((first >> 1 << 64) + finer + 0.5) / 2**128
        found.append((1 if first & 1 else -1) * ndtri(tail))
    return np.array(found)


@pytest.mark.parametrize(("key", "block", "words"), RFC_8439)
def test_the_stream_is_that_of_rfc_8439(key, block, words):
    found = chacha.stream(from_bytes(bytes.fromhex(key)), block + 1)[block]
    assert found.astype("<u4").tobytes().hex() == words


def test_the_stream_is_that_of_another_implementation():
    for key in KEYS:
        assert np.array_equal(chacha.stream(key, 1000).ravel(), other_stream(key, 1000))


@pytest.mark.parametrize("count", [0, 1, 3, 64, 65, 30_001])
def test_normals_are_those_of_the_stream(count):
    found = chacha.normals_of_keys(KEYS, count)
    assert found.shape == (3, count)
    for key, row in zip(KEYS, found, strict=True):
        np.testing.assert_allclose(row, other_normals(key, count), rtol=2e-15, atol=3e-16)


def test_threads_and_lengths_move_no_bit(monkeypatch):
    whole = chacha.normals_of_keys(KEYS, 50_000)
    monkeypatch.setattr(chacha, "get_num_threads", lambda: 3)
    assert np.array_equal(chacha.normals_of_keys(KEYS, 50_000), whole)
    assert np.array_equal(chacha.normals_of_keys(KEYS[1:2], 4321)[0], whole[1, :4321])


def test_every_machine_computes_these_bits():
    # A simulation with a seed has the same noise everywhere, and a GPU that of the CPU.
    drawn = chacha.normals_of_keys(np.arange(8, dtype=np.uint32)[None], 1 << 16)
    golden = "9b5d3789eb60a27899a8452396d5b7ab42f356b299a1b0f9db7744140214f851"
    assert hashlib.sha256(drawn.tobytes()).hexdigest() == golden


def test_keys_of_another_shape_and_too_many_normals_are_refused():
    with pytest.raises(ValueError, match="expected uint32"):
        chacha.normals_of_keys(KEYS.astype(np.int64), 1)
    with pytest.raises(ValueError, match="the length of a stream"):
        chacha.normals_of_keys(KEYS, chacha.MOST_NORMALS + 1)
    assert chacha.normals_of_keys(KEYS[:0], 5).shape == (0, 5)


def exact(tail):
    """Return -Phi^-1(tail) to 40 digits: Newton's method on erfc."""
    with mpmath.workdps(40):
        x, tail = mpmath.mpf(-float(ndtri(tail))), mpmath.mpf(tail)
        for _ in range(4):
            x += (mpmath.erfc(x / mpmath.sqrt(2)) / 2 - tail) / mpmath.npdf(x)
        return x


def test_magnitudes_invert_the_distribution_function():
    rng = np.random.default_rng(0)
    tails = np.concatenate(
        [
            rng.uniform(0, 0.5, 60),
            2.0 ** -np.linspace(1.01, 129, 120),
            0.5 - 2.0 ** -np.arange(3.0, 54.0),
            np.nextafter(chacha.CENTRE, [0, 1]),  # where the parts of the approximation meet
            math.exp(-25) * (1 + np.arange(-3, 4) * 1e-15),
        ]
    )
    found = chacha.magnitudes(tails)
    for tail, value in zip(tails.tolist(), found.tolist(), strict=True):
        assert abs(float(value / exact(tail) - 1)) < 8e-16
    assert chacha.magnitudes(np.array([0.5])) == 0


def test_cells_of_the_grid_have_their_probability():
    """The probability of a cell of 2^-24 deviations, counted exactly in tails, near and far.

    The inverse falls, so a cell is an interval of tails, whose ends bisection finds.
    """

    def edge(value):
        low, high = 2.0**-129, 0.5
        while np.nextafter(low, 1) < high:
            middle = max((low + high) / 2, np.nextafter(low, 1))
            if chacha.magnitudes(np.array([middle]))[0] > value:
                low = middle
            else:
                high = middle
        return high

    width = 2.0**-24
    for place in (0.01, 0.3, 1.0, 1.4395, 2.5, 5.0, 6.8, 9.0):
        value = math.floor(place / width) * width
        with mpmath.workdps(40):
            wanted = mpmath.ncdf(-mpmath.mpf(value)) - mpmath.ncdf(-mpmath.mpf(value + width))
        assert edge(value) - edge(value + width) == pytest.approx(float(wanted), rel=3e-8)


@pytest.mark.parametrize("depth", [44, 50, 60])
def test_the_tail_is_finer_than_the_grid(depth):
    # The grid may be a 2^-26th of the deviation or finer (many numbers, large multiplier). If one
    # word of 64 bits fixed the value, cells of that grid far out would be reached by no word at
    # all: with 5 million numbers, 100 rounds and multiplier 37.3 (epsilon 1 at delta 1e-5), posts
    # that are impossible under the neighbour would have probability 2.9e-4, far above delta.
    rng, cells = np.random.default_rng(depth), set()
    for _ in range(16):
        x = rng.integers(0, 2**32, (16, chacha.LANES), dtype=np.uint64).astype(np.uint32)
        word = 2 ** (64 - depth + 1)  # the tail is about 2^-depth, whatever the finer word is
        x[::4], x[1::4] = word % 2**32, word >> 32
        tails, signs = np.empty(4 * chacha.LANES), np.empty(4 * chacha.LANES)
        chacha._split(x, tails, signs)
        assert (signs == 1).all()
        cells |= set(np.rint(chacha.magnitudes(tails) * 2**31))
    assert len(cells) > 100, f"beyond {min(cells) / 2**31:.2f} deviations noise is lumpy"


def test_a_draw_takes_a_fresh_key_of_256_bits(monkeypatch):
    normals(SystemEntropy(), 1)  # compiled, which names files at random
    drawn, system = [], os.urandom

    def urandom(count):
        drawn.append(system(count))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    source = SystemEntropy()
    first, second = normals(source, 1000), normals(source, 1000)
    assert [len(key) for key in drawn] == [32, 32]
    assert not np.array_equal(first, second)
    for key, row in zip(tuple(drawn), (first, second), strict=True):
        assert np.array_equal(chacha.normals_of_keys(from_bytes(key)[None], 1000)[0], row)


def test_every_client_has_a_key_of_its_own():
    open_source = client_entropy(5, 2)
    found = normals_on(torch.device("cpu"), open_source.keys([3, 1]), 777)
    for client, row in zip((3, 1), found.numpy(), strict=True):
        assert np.array_equal(row, normals(client_entropy(5, 2)(client), 777))
    assert normals_on(torch.device("cpu"), open_source.keys([]), 777).shape == (0, 777)


@pytest.mark.parametrize("clients", [[], [0], [7, 3, 2**40], list(range(0, 2000, 7))])
def test_keys_of_clients_drawn_together_are_those_of_their_sources(clients):
    for round in range(3):
        sources = client_entropy(11, round)
        # NumPy's own generator, opened for each client.
        wanted = draw_keys([sources(client) for client in clients])
        assert np.array_equal(sources.keys(clients), wanted)


def test_keys_of_clients_are_fresh_in_real_runs():
    drawn = np.concatenate([client_entropy(None, 0).keys(range(50)) for _ in range(2)])
    assert drawn.shape == (100, 8)
    assert len(np.unique(drawn)) > 790  # of 800 words of 32 bits


INTERPRETED = """
import numpy as np, torch
from coterie.privacy import chacha, chacha_gpu
keys = np.random.default_rng(0).integers(0, 2**32, (2, 8), dtype=np.uint64).astype(np.uint32)
found = chacha_gpu.normals_of_keys(keys, 1030, torch.device("cpu")).numpy()
assert np.array_equal(found, chacha.normals_of_keys(keys, 1030))
"""


@pytest.mark.slow
def test_the_gpu_kernel_computes_the_same_bits_in_the_interpreter():
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_computes_the_same_bits():
    pytest.importorskip("triton")
    from coterie.privacy import chacha_gpu

    device = torch.device("cuda")
    for count in (1, 5, 511, 1_000_003):
        found = chacha_gpu.normals_on(device, KEYS, count)  # a warning fails the test
        assert np.array_equal(found.cpu().numpy(), chacha.normals_of_keys(KEYS, count))


@pytest.mark.gpu
@needs_cuda
def test_messages_with_local_noise_are_the_same_on_a_gpu():
    mechanism = LocalGaussianSum(0.7, 1.3, cohort=12.0)
    rows = {"w": torch.randn(9, 5000, generator=torch.Generator().manual_seed(0))}
    sums = []
    for device in ("cpu", "cuda"):
        here = {name: leaf.to(device) for name, leaf in rows.items()}
        part, _ = bound(mechanism, here, torch.arange(9), client_entropy(3, 1))
        sums.append(part.total["w"])
    step = mechanism.step(5000)
    # Norms are summed in another order: a clipped number may round to the next cell.
    apart = ((sums[0] - sums[1]) / step).abs()
    assert apart.max() <= 9
    assert (apart == 0).double().mean() > 0.999
