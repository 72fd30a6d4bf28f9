"""Lightning's own Trainer with SWAG, IVON and Laplace, against plain loops and `infer`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.integrations import LightningIVON, LightningLaplace, LightningSWAG
from posterity.likelihoods import Categorical, Gaussian
from posterity.optim import IVON
from posterity.priors import Normal

ROWS, SIZE = 22, 4  # the last batch of a pass has two rows
FLOAT64 = torch.float64


def rows() -> TensorDataset:
    x = torch.randn(ROWS, 3, dtype=FLOAT64, generator=torch.Generator().manual_seed(0), device="cpu")
    return TensorDataset(x, (x.sum(1) > 0).long())


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(rows(), batch_size=SIZE)


def problem(net: nn.Module) -> po.Joint:
    return po.Joint(net, Categorical(), Normal(scale=1.0), num_data=ROWS)


def network(norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        middle = nn.BatchNorm1d(5) if norm else nn.Identity()
        return nn.Sequential(nn.Linear(3, 5), middle, nn.Tanh(), nn.Linear(5, 2)).to(FLOAT64)


def ivon(net: nn.Module, **settings: Any) -> IVON:
    return IVON(net.parameters(), lr=0.1, ess=ROWS, beta2=0.9, weight_decay=1 / ROWS, **settings)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2)


def vector(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


@pytest.fixture
def lightning() -> Any:
    pytest.importorskip("lightning")
    import lightning.pytorch

    return lightning.pytorch


def module(lightning: Any, net: nn.Module, optimizer: Any) -> Any:
    """A LightningModule that keeps its weights as validation sees them."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.validated: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(vector(self))

        def configure_optimizers(self) -> Any:
            return optimizer(self.net)

    return Module()


def trainer(lightning: Any, folder: Path, *callbacks: Any, epochs: int = 4, **settings: Any) -> Any:
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
    place = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "num_sanity_val_steps": 0}
    return lightning.Trainer(max_epochs=epochs, callbacks=[*callbacks], **quiet, **place, **settings)


# Lightning has advice, and uses what torch will drop.
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_ivon_is_that_of_a_plain_loop(lightning: Any, tmp_path: Path, accumulated: int) -> None:
    net = network()
    callback, own = LightningIVON(problem), module(lightning, net, ivon)
    with pytest.raises(ValueError, match=r"LightningIVON.posterior is made at the end of training. Train first."):
        callback.posterior  # noqa: B018
    settings = {"accumulate_grad_batches": accumulated, "val_check_interval": 1, "limit_val_batches": 1}
    trainer(lightning, tmp_path, callback, **settings).fit(own, loader(), loader())

    plain, means = network(), []
    optimizer = ivon(plain)
    for _ in range(4):
        batches = list(loader())
        for low in range(0, len(batches), accumulated):
            group, before = batches[low : low + accumulated], vector(plain)
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                for x, y in group:
                    (nn.functional.cross_entropy(plain(x), y) / accumulated).backward()
            optimizer.step()
            means += [before] * (len(group) - 1) + [vector(plain)]
    q, wanted = callback.posterior, optimizer.posterior(problem(plain), plain)
    assert torch.equal(q.mean, wanted.mean)
    assert torch.equal(q.variance, wanted.variance)
    assert torch.equal(q.mean, vector(net))
    assert torch.equal(torch.stack(own.validated), torch.stack(means))  # validation after every batch, at means
    x = next(iter(loader()))[0]
    assert q.predict(x).probs.shape == (SIZE, 2)


def test_ivon_refuses_what_would_be_wrong(lightning: Any, tmp_path: Path, caplog: Any) -> None:
    def fails(kind: type[Exception], words: str, optimizer: Any, **settings: Any) -> None:
        own = module(lightning, network(), optimizer)
        with pytest.raises(kind, match=words):
            trainer(lightning, tmp_path, LightningIVON(problem), **settings).fit(own, loader())

    fails(TypeError, "the optimizer must be posterity.optim.IVON. Got SGD. Return IVON", sgd)
    twice = {"accumulate_grad_batches": 2}
    fails(ValueError, "mc_samples must be 1 with accumulate_grad_batches", lambda n: ivon(n, mc_samples=2), **twice)

    half = lightning.plugins.MixedPrecision("16-mixed", "cpu")
    fails(ValueError, "with precision '16-mixed' Lightning runs batches at the means", ivon, plugins=[half])

    def broken(net: nn.Module) -> po.Joint:
        raise LookupError("no such head")

    with pytest.raises(LookupError, match="no such head"):  # before the training
        trainer(lightning, tmp_path, LightningIVON(broken)).fit(module(lightning, network(), ivon), loader())
    with pytest.raises(TypeError, match=r"LightningIVON.problem must be a function of the module"):
        LightningIVON(problem(network()))  # type: ignore[arg-type]
    callback = LightningIVON(problem)
    assert isinstance(callback, lightning.Callback)
    assert isinstance(copy.copy(callback), type(callback))
    net = network()
    trainer(lightning, tmp_path, LightningIVON(problem), epochs=1, gradient_clip_val=0.5).fit(
        module(lightning, net, ivon), loader()
    )
    assert "LightningIVON: gradients are clipped to 0.5" in caplog.text


def test_an_exception_leaves_the_means(lightning: Any, tmp_path: Path) -> None:
    class Fails(lightning.Callback):  # type: ignore[misc]
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            assert not torch.equal(vector(pl_module), means)
            raise RuntimeError("full memory")

    net = network()
    means = vector(net)
    with pytest.raises(RuntimeError, match="full memory"):
        trainer(lightning, tmp_path, LightningIVON(problem), Fails(), accumulate_grad_batches=2).fit(
            module(lightning, net, ivon), loader()
        )
    assert torch.equal(vector(net), means)


@pytest.mark.parametrize("rank", [0, 3])
def test_swag_has_the_moments_of_the_recorded_weights(lightning: Any, tmp_path: Path, rank: int) -> None:
    recorded: list[Tensor] = []

    class Record(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step > len(recorded):
                recorded.append(vector(pl_module))

    net = network(norm=True)
    callback = LightningSWAG(problem, every=2, warmup=3, rank=rank)
    trainer(lightning, tmp_path, callback, Record(), accumulate_grad_batches=2).fit(
        module(lightning, net, sgd), loader()
    )
    assert len(recorded) == 12
    thetas = torch.stack(recorded)[4::2]  # steps 5, 7, 9, 11
    mean, variance = thetas.mean(0), thetas.var(0, correction=0)
    wanted = torch.diag(variance)
    if rank:
        running = thetas.cumsum(0) / torch.arange(1, 5, dtype=FLOAT64).unsqueeze(1)
        deviations = (thetas - running)[-rank:]
        wanted = 0.5 * (wanted + deviations.T @ deviations / (rank - 1))
    q = callback.posterior
    torch.testing.assert_close(q.mean, mean, rtol=1e-12, atol=1e-14)
    covariance = q.precision.solve(torch.eye(mean.numel(), dtype=FLOAT64))
    torch.testing.assert_close(covariance, wanted, rtol=1e-8, atol=1e-12)

    at_mean = copy.deepcopy(net)  # batch-norm statistics of a pass at the mean
    nn.utils.vector_to_parameters(mean, at_mean.parameters())
    hidden = [at_mean[0](x) for x, _ in loader()]
    names = (
        ("net.1.running_mean", torch.stack([h.mean(0) for h in hidden]).mean(0)),
        ("net.1.running_var", torch.stack([h.var(0) for h in hidden]).mean(0)),
    )
    for name, value in names:
        torch.testing.assert_close(q.buffers[name], value.detach(), rtol=1e-10, atol=1e-12)
    assert q.predict(rows().tensors[0]).probs.shape == (ROWS, 2)


def test_swag_continues_from_a_checkpoint(lightning: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 3, "rank": 2}
    whole = LightningSWAG(problem, **settings)
    trainer(lightning, tmp_path, whole).fit(module(lightning, network(), sgd), loader())
    first, second = LightningSWAG(problem, **settings), LightningSWAG(problem, **settings)
    half = trainer(lightning, tmp_path, first, epochs=2)
    half.fit(module(lightning, network(), sgd), loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    path = str(tmp_path / "half.ckpt")
    trainer(lightning, tmp_path, second).fit(module(lightning, network(), sgd), loader(), ckpt_path=path)
    assert torch.equal(second.posterior.mean, whole.posterior.mean)
    assert torch.equal(second.posterior.variance, whole.posterior.variance)
    assert not torch.equal(first.posterior.mean, whole.posterior.mean)


def test_swag_says_what_is_missing(lightning: Any, tmp_path: Path, caplog: Any) -> None:
    few = LightningSWAG(problem, every=10, rank=3)
    trainer(lightning, tmp_path, few).fit(module(lightning, network(), sgd), loader())
    assert "LightningSWAG must collect at least 3 weight vectors (2, or its rank). Got 2 from 24 steps" in caplog.text
    with pytest.raises(ValueError, match=r"one every 10 after the first 0. Use more steps"):
        few.posterior  # noqa: B018
    with pytest.raises(ValueError, match=r"LightningSWAG.every must be"):
        LightningSWAG(problem, every=0)
    noisy = LightningSWAG(lambda net: po.Joint(net, Gaussian(), Normal(scale=1.0), ROWS))
    with pytest.raises(ValueError, match="LightningSWAG: the noise must be given"):
        trainer(lightning, tmp_path, noisy).fit(module(lightning, network(), sgd), loader())


def test_laplace_is_that_of_infer(lightning: Any, tmp_path: Path) -> None:
    net = network(norm=True)
    method = po.methods.Laplace(structure=po.curvature.Kronecker())
    callback, inner = LightningLaplace(problem, method), LightningLaplace(problem, method, network=lambda m: m.net)
    trainer(lightning, tmp_path, callback, inner).fit(module(lightning, net, sgd), loader())
    q, trace = po.infer(method, problem(net), loader())
    x = rows().tensors[0]
    for other in (callback, inner):
        assert torch.equal(other.posterior.predict(x).probs, q.predict(x).probs)
        assert torch.equal(other.posterior.log_evidence, q.log_evidence)
        assert other.trace is not None
        assert torch.equal(other.trace["log_likelihood"], trace["log_likelihood"])

    class Pairs(torch.utils.data.Dataset[Any]):  # rows that the network does not take
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(2, dtype=FLOAT64), 0

    bad = LightningLaplace(problem, method, data=DataLoader(Pairs(), batch_size=SIZE))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(po.errors.BadData):  # before the training
        trainer(lightning, tmp_path, bad).fit(module(lightning, net, sgd), loader())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
