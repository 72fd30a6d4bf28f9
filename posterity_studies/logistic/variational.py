"""The Gaussians that maximise the ELBO of the regression: one of independent weights, one of full covariance."""

from posterity.inference import Method, infer
from posterity.methods import FullRank, MeanField
from posterity.methods.parts.gradients import LocalReparameterisation
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Gaussian, Linearized
from posterity_studies.logistic.regression import Regression

STEPS = 2000
METHODS: dict[str, Method] = {
    "Variational, factorised": MeanField(STEPS, None, Adam(0.02), Cosine(), LocalReparameterisation(draws=32)),
    "Variational, full": FullRank(STEPS, None, 4, Adam(0.02), Cosine()),
}


def variational(regression: Regression, seed: int) -> dict[str, Linearized]:
    """The posteriors by name, from the mode on; their logits are Gaussian, so that predictions need no draws."""
    found = {}
    for name, method in METHODS.items():
        rows = regression.inputs, regression.targets
        q, _ = infer(method, regression.joint, rows, start=regression.mode, seed=seed, progress=False)
        assert isinstance(q, Gaussian)
        found[name] = Linearized(q.joint, q)
    return found
