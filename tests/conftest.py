"""What all tests share: a fixed seed, and the same number of threads everywhere."""

import random

import numpy as np
import pytest
import torch

# Sums of floats depend on how many threads share them: fixed, so that a test sees the same bits on every machine.
torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
