"""Energy: whether momenta drawn anew take a Hamiltonian sampler across the levels of its target."""

from torch import Tensor

from posterity.errors import shown


def e_bfmi(energy: Tensor) -> Tensor:
    """Estimated Bayesian fraction of missing information of each chain, from energies (C, D), as (C,) in float64.

    **Math**: mean_t (E_t - E_{t-1})^2 / Var(E). The change of energy between draws comes from the new momentum alone;
    where it is small beside the spread of the energy, the chain walks slowly from level to level, and tails stay
    unseen.

    **Limit**: below 0.3 (Stan warns at 0.2) the tails are not explored; about 1 to 2 is good. NaN where the energy
    stands still, is not finite, or has fewer than 2 draws.

    **Cost**: one pass over the energies.

    **References**: Betancourt (2016), Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo.

    **Example**:

    >>> import torch
    >>> e_bfmi(torch.tensor([[1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]))
    tensor([3.0000, 0.6000], dtype=torch.float64)
    """
    if not isinstance(energy, Tensor) or energy.dim() != 2:
        raise ValueError(f"e_bfmi needs energies (chains, draws). Got {shown(energy)}.")
    energy = energy.double()
    if energy.shape[1] < 2:
        return energy.new_full(energy.shape[:1], float("nan"))
    return energy.diff(dim=1).square().mean(1) / (energy - energy[:, :1]).var(1)
