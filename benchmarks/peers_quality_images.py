"""MNIST with LeNet: 10,000 training rows, 1,000 for validation, 2,500 for the test; other images as foreign inputs."""

import copy
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from benchmarks.laplace_parts import Batches
from benchmarks.mean_field_layers import without_init
from benchmarks.peers_quality_parts import (
    BATCH,
    BAYESIAN_TORCH_DRAWS,
    MEMBERS,
    OURS,
    Contender,
    batches,
    bayesian_torch,
    bayesian_torch_loss,
    descend,
    ivon,
    ivon_outputs,
    repeated_outputs,
)
from posterity.datasets import mnist, mnist_test

ROWS, HELD, EPOCHS = 10_000, 1_000, 8
EVERY, EVERY_FOREIGN, FEW = 4, 20, 5  # of the 10,000 test rows of each data set; of these for the slow predictions
STEPS = EPOCHS * -(-ROWS // BATCH)
RATE, MOMENTUM, DECAY, DROPPED, DROPOUT_DRAWS = 0.05, 0.9, 5e-4, 0.4, 16
PIXEL_MEAN, PIXEL_SCALE = 0.1307, 0.3081  # as torch-uncertainty and bayesian-torch standardise MNIST
FOREIGN = ("fashion-mnist", "kmnist")
Predict = Callable[[Tensor], Tensor]


class Images(NamedTuple):
    """Rows of each part, and foreign inputs by name."""

    train: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    foreign: dict[str, Tensor]


def load(few: bool = False) -> Images:
    """Return the first training rows, those after them for validation, and every fourth test row, or fewer."""

    def standard(images: Tensor) -> Tensor:
        return (images - PIXEL_MEAN) / PIXEL_SCALE

    data = mnist()
    inputs, targets = standard(data.train.inputs[: ROWS + HELD]), data.train.targets[: ROWS + HELD]
    step = FEW if few else 1
    return Images(
        (inputs[:ROWS], targets[:ROWS]),
        (inputs[ROWS:], targets[ROWS:]),
        (standard(data.test.inputs[:: EVERY * step]), data.test.targets[:: EVERY * step]),
        {name: standard(mnist_test(name).inputs[:: EVERY_FOREIGN * step]) for name in FOREIGN},
    )


def fresh(seed: int) -> nn.Module:
    """The network at the first weights of a seed."""
    torch.manual_seed(seed)
    return po.networks.LeNet()


def train(module: nn.Module, data: Images, seed: int) -> nn.Module:
    """The recipe of torch-uncertainty's experiments with LeNet on MNIST, with a step size that falls to zero."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), RATE, MOMENTUM, weight_decay=DECAY, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rows = batches(*data.train, BATCH, STEPS, seed)
    descend(optimizer, lambda x, y: F.cross_entropy(module(x), y), rows, schedule)
    return module.eval()


def point(data: Images, seed: int) -> nn.Module:
    """The point estimate that post-hoc methods begin at."""
    return train(fresh(seed), data, seed)


def by_softmax(outputs: Callable[[Tensor], Tensor]) -> Predict:
    """Mean class probabilities over draws (S, N, C)."""
    return lambda inputs: outputs(inputs).softmax(-1).mean(0)


def plain(data: Images, module: nn.Module, seed: int) -> Predict:
    """The point estimate alone."""
    return by_softmax(lambda inputs: repeated_outputs(module, inputs, 1))


def laplace_torch(data: Images, module: nn.Module, seed: int, *, subset: str, grid: bool = False) -> Predict:
    """Kronecker Laplace of laplace-torch, its prior precision by the evidence or by a grid on validation rows."""
    from laplace import Laplace  # type: ignore[import-not-found]

    la = Laplace(copy.deepcopy(module), "classification", subset_of_weights=subset, hessian_structure="kron")
    la.fit(Batches(*data.train, 512))
    if grid:
        la.optimize_prior_precision(
            method="gridsearch", pred_type="glm", link_approx="probit", val_loader=Batches(*data.held, 500)
        )
    else:
        la.optimize_prior_precision(method="marglik")
    size = 500 if subset == "last_layer" else 4
    return lambda inputs: torch.cat([la(part, pred_type="glm", link_approx="probit") for part in inputs.split(size)])  # type: ignore[no-untyped-call]


def ivon_opt(data: Images, module: nn.Module, seed: int, *, authors: bool) -> Predict:
    """ivon-opt as in its README, or with the settings of its authors' images."""
    import ivon as library  # type: ignore[import-not-found, unused-ignore]

    net, rows = fresh(seed), len(data.train[1])
    schedule: Any = None
    if authors:
        optimizer = library.IVON(net.parameters(), lr=0.2, ess=rows, hess_init=0.5, beta2=0.99999, weight_decay=2e-4)
        warm = STEPS // 40  # 5 of their 200 epochs
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, 1.0, warm)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - warm)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [warm])
    else:
        optimizer = library.IVON(net.parameters(), lr=0.1, ess=rows)
    batched = batches(*data.train, BATCH, STEPS, seed)
    ivon(optimizer, lambda x, y: F.cross_entropy(net(x), y), batched, schedule=schedule)
    return by_softmax(lambda inputs: ivon_outputs(optimizer, net, inputs))


def bayesian_layers(
    data: Images, module: nn.Module, seed: int, *, moped: bool = False, by_batch: bool = False
) -> Predict:
    """bayesian-torch's layers, from the first weights' scale or at the point (MOPED)."""
    net = copy.deepcopy(module) if moped else fresh(seed)
    bayesian_torch(net, moped_enable=moped)
    loss = bayesian_torch_loss(net, F.cross_entropy, BATCH if by_batch else len(data.train[1]))
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2], 0.1)
    descend(optimizer, loss, batches(*data.train, BATCH, STEPS, seed), schedule)
    return by_softmax(lambda inputs: repeated_outputs(net, inputs, BAYESIAN_TORCH_DRAWS))


def deep_ensembles(data: Images, module: nn.Module, seed: int) -> Predict:
    """torch-uncertainty's wrapper of models trained one by one."""
    without_init("torch_uncertainty")
    from torch_uncertainty.methods.deep_ensembles import deep_ensembles as wrapped  # type: ignore[import-not-found]

    members = [train(fresh(1000 * seed + k), data, 1000 * seed + k) for k in range(MEMBERS)]
    return stacked(wrapped(members, task="classification"), MEMBERS)


def stacked(module: nn.Module, count: int) -> Predict:
    """Mean probabilities of a wrapper that returns (count N, C)."""

    @torch.no_grad()
    def predict(inputs: Tensor) -> Tensor:
        parts = inputs.split(1000)  # type: ignore[no-untyped-call]
        return torch.cat([module(part).softmax(-1).unflatten(0, (count, -1)).mean(0) for part in parts])

    return predict


def with_dropout(seed: int) -> nn.Module:
    """LeNet with dropout where torch-uncertainty's has it."""
    net = fresh(seed)
    layers = list[nn.Module]()
    for index, layer in enumerate(net.children()):
        layers.append(layer)
        if isinstance(layer, nn.ReLU):
            layers.append(nn.Dropout2d(DROPPED) if index < 6 else nn.Dropout(DROPPED))
    return nn.Sequential(*layers)


def mc_dropout(data: Images, module: nn.Module, seed: int) -> Predict:
    """torch-uncertainty's wrapper of a model trained with dropout."""
    without_init("torch_uncertainty")
    from torch_uncertainty.methods.mc_dropout import mc_dropout as wrapped  # type: ignore[import-not-found]

    net = wrapped(with_dropout(seed), num_estimators=DROPOUT_DRAWS, last_layer=False)
    return stacked(train(net, data, seed), DROPOUT_DRAWS)


def temperature(data: Images, module: nn.Module, seed: int) -> Predict:
    """torch-uncertainty's temperature on validation rows."""
    for package in ("torch_uncertainty", "torch_uncertainty.post_processing"):
        without_init(package)
    from torch_uncertainty import post_processing  # type: ignore[import-not-found]
    from torch_uncertainty.post_processing.abstract import PostProcessing  # type: ignore[import-not-found]

    post_processing.PostProcessing = PostProcessing  # its scaler takes it from the package
    from torch_uncertainty.post_processing.calibration.temperature_scaler import TemperatureScaler  # type: ignore[import-not-found]

    scaled = TemperatureScaler(model=module)
    scaled.fit(Batches(*data.held, 500), progress=False)
    return by_softmax(lambda inputs: repeated_outputs(scaled, inputs, 1).detach())


def our_laplace(data: Images, module: nn.Module, seed: int, **given: Any) -> Predict:
    """`po.laplace` with the rows left out for validation, or without."""
    q = po.laplace(module, data.train, "classification", seed=seed, progress=False, **given)
    return lambda inputs: q.predict(inputs).probs  # type: ignore[attr-defined, no-any-return]


def our_fit(
    data: Images, module: nn.Module, seed: int, *, method: Any, net: Callable[[int], nn.Module] = fresh
) -> Predict:
    """A method of `posterity.methods` under the prior of README, which is that of bayesian-torch's README, too."""
    joint = po.Joint(net(seed), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=len(data.train[1]))
    q, _ = po.infer(method(), joint, data.train, seed=seed, progress=False)
    return lambda inputs: q.predict(inputs).probs  # type: ignore[attr-defined, no-any-return]


def our_ivon(data: Images, module: nn.Module, seed: int) -> Predict:
    """`optim.IVON` as docs/coming-from.md has it."""
    net, rows = fresh(seed), len(data.train[1])
    optimizer = po.optim.IVON(net.parameters(), lr=0.1, ess=rows, weight_decay=1 / rows)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    batched = batches(*data.train, BATCH, STEPS, seed)
    ivon(optimizer, lambda x, y: F.cross_entropy(net(x), y), batched, schedule=schedule)
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=rows)
    q = optimizer.posterior(joint, net)
    return lambda inputs: q.predict(inputs).probs  # type: ignore[attr-defined, no-any-return]


def our_temperature(data: Images, module: nn.Module, seed: int) -> Predict:
    """`Calibrated.fit` of the point."""
    inner = po.posteriors.Point.of(module, po.likelihoods.Categorical())
    q = po.posteriors.Calibrated.fit(inner, data.held)
    return lambda inputs: q.predict(inputs).probs  # type: ignore[attr-defined, no-any-return]


def _method(name: str, *, net: Callable[[int], nn.Module] = fresh) -> Any:
    def make() -> Any:
        return getattr(po.methods, name)(steps=STEPS, batch_size=BATCH)

    return functools.partial(our_fit, method=make, net=net)


def _members() -> Any:
    return po.methods.Ensemble(po.methods.MAP(steps=STEPS, batch_size=BATCH), size=MEMBERS)


_HELD = "validation rows as in docs/trained-network.md, all else left out"
_SAME = "prior as in README; steps and rows of a step as all have; all else left out"
POINT = Contender(
    OURS,
    "point",
    plain,
    "deep_ensemble.yaml of torch-uncertainty's MNIST experiments: SGD of step size 0.05, Nesterov momentum 0.9, "
    "weight decay 5e-4; here the step size falls to 0 along a cosine",
)
CONTENDERS: dict[str, Contender] = {
    "point": POINT,
    "laplace-torch last layer, evidence": Contender(
        "laplace-torch", "Laplace", functools.partial(laplace_torch, subset="last_layer"),
        "its calibration example, and mnist_default.yaml of the laplace-redux experiments", True,
    ),
    "laplace-torch last layer, grid": Contender(
        "laplace-torch", "Laplace", functools.partial(laplace_torch, subset="last_layer", grid=True),
        "its README (grid search on validation rows), with its default structure and weights", True,
    ),
    "po.laplace": Contender(
        OURS, "Laplace", lambda d, m, s: our_laplace(d, m, s, validation=d.held), _HELD, True
    ),
    "po.laplace last layer": Contender(
        OURS, "Laplace", lambda d, m, s: our_laplace(d, m, s, validation=d.held, subset="last_layer"), _HELD, True
    ),
    "po.laplace, no validation rows": Contender(OURS, "Laplace", our_laplace, "all left out", True),
    "ivon-opt README": Contender(
        "ivon-opt", "IVON", functools.partial(ivon_opt, authors=False), "its README: lr 0.1, ess the number of rows"
    ),
    "ivon-opt images": Contender(
        "ivon-opt", "IVON", functools.partial(ivon_opt, authors=True),
        "train_ivon.sh of ivon-experiments (CIFAR-10): lr 0.2, hess_init 0.5, weight decay 2e-4, warm-up and cosine",
    ),
    "optim.IVON": Contender(OURS, "IVON", our_ivon, "docs/coming-from.md, without its beta2"),
    "NaturalGradient": Contender(OURS, "IVON", _method("NaturalGradient"), _SAME),
    "bayesian-torch": Contender(
        "bayesian-torch", "mean field", bayesian_layers,
        "README: prior and start; main_bayesian_mnist.py: Adadelta 1.0, then 0.1, and the KL over the number of rows",
    ),
    "bayesian-torch MOPED": Contender(
        "bayesian-torch", "mean field", functools.partial(bayesian_layers, moped=True),
        "the same with MOPED at the point, delta 0.5", True,
    ),
    "bayesian-torch README": Contender(
        "bayesian-torch", "mean field", functools.partial(bayesian_layers, by_batch=True),
        "its README to the letter: the KL over the batch size",
    ),
    "MeanField": Contender(OURS, "mean field", _method("MeanField"), _SAME),
    "torch-uncertainty ensemble": Contender(
        "torch-uncertainty", "ensemble", deep_ensembles,
        "deep_ensemble.yaml of its MNIST experiments: 5 members, by the recipe of the point",
    ),
    "Ensemble": Contender(OURS, "ensemble", functools.partial(our_fit, method=_members), _SAME),
    "torch-uncertainty MC dropout": Contender(
        "torch-uncertainty", "dropout", mc_dropout,
        "its tutorial: rate 0.4 behind each activation, 16 draws; trained as the point",
    ),
    "MCDropout": Contender(OURS, "dropout", _method("MCDropout", net=with_dropout), _SAME + "; the same layers"),
    "torch-uncertainty temperature": Contender(
        "torch-uncertainty", "temperature", temperature, "its tutorial: TemperatureScaler on validation rows", True
    ),
    "Calibrated": Contender(OURS, "temperature", our_temperature, _HELD, True),
}  # fmt: skip
SLOW: dict[str, Contender] = {
    "point": POINT,
    "laplace-torch all weights": Contender(
        "laplace-torch", "Laplace", functools.partial(laplace_torch, subset="all"),
        "subset_of_weights='all' with its default structure; evidence", True,
    ),
    "po.laplace": CONTENDERS["po.laplace"],
}  # fmt: skip


def scores(predict: Predict, data: Images) -> dict[str, Any]:
    """Scores on the test rows, entropy as detector of foreign inputs, and the CPU seconds of the test rows."""
    begin = time.process_time()
    probs = predict(data.test[0]).double()
    seconds = time.process_time() - begin

    def pred(values: Tensor) -> po.predictive.ClassPredictive:
        return po.predictive.ClassPredictive(values / values.sum(-1, keepdim=True))

    inside, labels = pred(probs), data.test[1]
    log_density = inside.log_prob(labels)
    found = {
        "predict_seconds": seconds,
        "nll": -float(log_density.mean()),
        "error": 1.0 - float(po.metrics.accuracy(inside, labels)),
        "ece": po.metrics.expected_calibration_error(inside, labels),
        "brier": float(po.metrics.brier_score(inside, labels)),
        "log_density": [round(float(value), 6) for value in log_density],
    }
    for name, inputs in data.foreign.items():
        found[f"auroc {name}"] = po.metrics.out_of_distribution_auroc(inside, pred(predict(inputs).double()))
    return found
