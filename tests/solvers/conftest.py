"""One thread for the tests of solvers."""

import numpy as np
import pytest
import torch

from coterie.core.rng import Rng
from coterie.solvers.sgd_kernels import draw_batches


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products: threads would only wait for one another and for others on the machine."""
    # The first compiled loop sets the number of OpenMP threads for everybody; let it do so first.
    draw_batches(Rng.seeded(0).keys(np.arange(2)), np.array([1, 1]), np.array([1, 1]), 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
