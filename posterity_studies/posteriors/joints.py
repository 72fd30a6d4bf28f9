"""Those models that a Joint can say exactly: regressions whose priors are normal, or flat as the limit of wide ones.

A `Gaussian` learns its noise under a normal prior on log sigma. With mean s^2 and standard deviation s that is
log sigma + O((log sigma)^2 / s^2) and a constant: flat in sigma for large s. Half-normal, half-Cauchy and half-t
priors on sigma are none of its limits, so the other regressions are sampled as densities only.
"""

import torch

from posterity.datasets.posteriordb import posteriordb_data
from posterity.datasets.uci import uci_classification
from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.gaussian import Gaussian
from posterity.model.joint import Joint
from posterity.priors.normal import Normal
from posterity_studies.posteriors.densities import Model, Values, regression_inputs

GERMAN_CREDIT = "german-credit"
WIDE = 1e4  # a prior scale beside which weights of order one are nothing: their log density varies by 1e-8


def joint(name: str) -> Model:
    """The posterior named so, as a linear network under a `Joint`."""
    return JOINTS[name](name)


def _linear(columns: int, bias: bool) -> torch.nn.Linear:
    return torch.nn.Linear(columns, 1, bias=bias, dtype=torch.float64, device="cpu")


def _german_credit(name: str) -> Model:
    data = uci_classification("german-credit")
    inputs = torch.cat([data.train.inputs, data.test.inputs])
    inputs = (inputs - inputs.mean(0)) / inputs.std(0, correction=0)
    rows = inputs, torch.cat([data.train.targets, data.test.targets])
    problem = Joint(_linear(inputs.shape[1], bias=True), Bernoulli(), Normal(1.0), len(inputs))

    def reported(values: Values) -> Values:
        return {"weights": torch.cat([values["weight"].squeeze(-2), values["bias"]], -1)}

    return Model(name, problem, rows, reported, correlated=True)


def _logistic(name: str) -> Model:
    data = posteriordb_data(name)
    inputs = data["income"].unsqueeze(-1)
    problem = Joint(_linear(1, bias=True), Bernoulli(), Normal(WIDE), len(inputs))

    def reported(values: Values) -> Values:
        return {"alpha": values["bias"].squeeze(-1), "beta": values["weight"].squeeze(-2)}

    return Model(name, problem, (inputs, data["vote"].unsqueeze(-1)), reported, correlated=True)


def _flat_regression(name: str) -> Model:
    inputs, targets = regression_inputs(name, posteriordb_data(name))
    likelihood = Gaussian(float(targets.std()), learn=True, log_scale_prior=(WIDE**2, WIDE))
    problem = Joint(_linear(inputs.shape[1], bias=False), likelihood, Normal(WIDE), len(inputs))

    def reported(values: Values) -> Values:
        return {"beta": values["weight"].squeeze(-2), "sigma": values["likelihood.log_scale"].squeeze(-1).exp()}

    return Model(name, problem, (inputs, targets.unsqueeze(-1)), reported, correlated=True)


JOINTS = {GERMAN_CREDIT: _german_credit, "nes_logit_data-nes_logit_model": _logistic, "nes2000-nes": _flat_regression}
"""The posteriors that `joint` knows."""
