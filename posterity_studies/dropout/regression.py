"""MC dropout on y = sin(x) + x, with given and with learnt rates, beside MAP."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posterity.datasets import DataSet
from posterity.datasets.toys import sine
from posterity.inference import Method, infer
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, MCDropout
from posterity.metrics import negative_log_likelihood, root_mean_squared_error
from posterity.model import Joint
from posterity.networks import MLP, ConcreteDropout
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.predictive import DrawsPredictive
from posterity.priors import Normal

HIDDEN = 50
RATE = 0.1
STEPS = 3000
DRAWS = 500
REACH = 7.0


@dataclass(frozen=True, eq=False)
class Curve:
    """Predictions of a method at the inputs `Regression.axis`: mean, and standard deviations of f and of y, (N,)."""

    mean: Tensor
    function_scale: Tensor
    target_scale: Tensor
    noise: float
    test_nll: float
    test_rmse: float
    rates: tuple[float, ...]

    def mean_scale(self, axis: Tensor, low: float, high: float) -> float:
        """Mean standard deviation of f where low <= |x| <= high."""
        inside = (axis.abs() >= low) & (axis.abs() <= high)
        return float(self.function_scale[inside].mean())


@dataclass(frozen=True, eq=False)
class Regression:
    """The data, the inputs of the curves, and the curves by method."""

    data: DataSet
    axis: Tensor
    curves: dict[str, Curve]


def regression(seed: int) -> Regression:
    """Fit all methods; the seed fixes the data, the first weights, the masks and the order of rows."""
    data = sine(seed=seed)
    axis = torch.linspace(-REACH, REACH, 281)
    curves = {}
    for name, method in (
        ("MAP", MAP(STEPS, None, Adam(0.01), Cosine())),
        ("MC dropout", _dropout()),
        ("MC dropout, learnt", _dropout()),
    ):
        net = _network(seed, learnt="learnt" in name)
        curves[name] = _curve(method, net, data, axis, seed)
    return Regression(data, axis, curves)


def _dropout() -> MCDropout:
    return MCDropout(STEPS, None, Adam(0.01), Cosine())


def _network(seed: int, *, learnt: bool) -> nn.Module:
    """Two hidden layers, dropout behind both, from the same first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(seed).fold("network").seed)
        net = MLP((1, HIDDEN, HIDDEN, 1), dropout=RATE)
    if not learnt:
        return net
    behind = [ConcreteDropout(layer, RATE) for layer in net if isinstance(layer, nn.Linear)][1:]
    return nn.Sequential(net[0], nn.ReLU(), behind[0], nn.ReLU(), behind[1])


def _curve(method: Method, net: nn.Module, data: DataSet, axis: Tensor, seed: int) -> Curve:
    joint = Joint(net, Gaussian(0.3, learn=True), Normal(1.0), len(data.train))
    q, trace = infer(method, joint, data.train.pair, seed=seed)
    pred, test = q.predict(axis.unsqueeze(1), draws=DRAWS), q.predict(data.test.inputs, draws=DRAWS)
    assert isinstance(pred, DrawsPredictive)
    assert isinstance(q.joint, Joint)
    learnt = tuple(float(trace[name][-1]) for name in trace if name.startswith("rate."))
    return Curve(
        mean=pred.mean.squeeze(1),
        function_scale=pred.epistemic.sqrt().squeeze(1),
        target_scale=pred.std.squeeze(1),
        noise=float(q.joint.likelihood.variance(torch.zeros(1, 1, 1)).sqrt()),
        test_nll=float(negative_log_likelihood(test, data.test.targets)),
        test_rmse=float(root_mean_squared_error(test, data.test.targets)),
        rates=learnt or ((RATE, RATE) if isinstance(method, MCDropout) else ()),
    )
