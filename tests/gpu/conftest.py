"""For the tests of kernels: the same random inputs in every run."""

import pytest
import torch


@pytest.fixture
def _seed() -> None:
    torch.manual_seed(0)
