"""Both ways through a chunk of rows."""

import pytest
import torch

from posterity.mixtures import sweeps


@pytest.fixture(params=["products", "whitened"])
def way(request, monkeypatch):
    """Each of the two ways through a chunk, whatever the means."""
    monkeypatch.setattr(sweeps, "TOLERATED", {"products": torch.inf, "whitened": -1.0}[request.param])
    return request.param
