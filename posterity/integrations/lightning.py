"""SWAG, IVON and Laplace under the `Trainer` of Lightning."""

from typing import Any

import torch
from torch import Tensor, nn

from posterity.errors import positive_whole, whole
from posterity.inference.infer import infer
from posterity.inference.method import Method
from posterity.inference.run import Trace
from posterity.integrations.hooks import AsNetwork, AsProblem, Draw, Hooks, ivon_of, logger, warn_of_clipping
from posterity.methods.laplace import Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.swag import SWAG, SWAGState
from posterity.model.joint import Joint
from posterity.model.problem import data_of
from posterity.numerics.random import Key
from posterity.optim.ivon import IVON
from posterity.optim.optimizer import SGD
from posterity.options import LEFT_OUT

_CALLBACK = ("lightning.pytorch", "Callback")
_IVON = "Return IVON(self.parameters(), lr=..., ess=...) from configure_optimizers."
_MOMENTS = ("mean", "squares", "deviations", "collected")


class LightningIVON(Hooks):
    """A Lightning callback for modules that train with `posterity.optim.IVON`: right accumulation, and the posterior.

    `problem` is a function that makes the joint of the module, which is called as in prediction, `module(inputs)`; or
    of what `network` makes of the module, such as `lambda module: module.net`.

    **Math**: Lightning hands IVON its batch as a closure, so that each step is at a draw of the weights. With
    `accumulate_grad_batches` it calls all but the last micro-batch outside of the optimiser, at the means; this
    callback moves the weights to the draw of the step for each of them. Validation and checkpoints see the means. A
    run is that of a plain loop with the same batches, bit for bit.

    **Limit**: `training_step` must return a mean over rows: then `ess` is the number of rows, and `weight_decay` is
    1 / (ess prior_scale^2). `gradient_clip_val` should be left out: the Hessian of clipped gradients is too small.
    Precision "16-mixed" is refused, because Lightning then runs the batch outside of the optimiser; "bf16-mixed" is
    right. A module with manual optimisation opens `sampled_params` itself, on
    `self.optimizers(use_pl_optimizer=False)`.

    **Cost**: see `posterity.optim.IVON`; one draw a micro-batch.

    **References**: Shen et al. (2024), Variational learning is effective for large deep networks.

    **Example** (needs lightning):

        callback = po.integrations.LightningIVON(
            lambda net: po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=1000)
        )
        lightning.Trainer(max_epochs=10, callbacks=[callback]).fit(module, loader)
        callback.posterior.predict(inputs).probs
    """

    base = _CALLBACK

    def __init__(self, problem: AsProblem, *, network: AsNetwork | None = None) -> None:
        super().__init__(problem, network)
        self._draw = Draw()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check what the Trainer was given."""
        optimizer = self._optimizer(trainer)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{self.name}: with precision '16-mixed' Lightning runs batches at the means, outside of IVON. Use "
                "precision='bf16-mixed' or '32-true'."
            )
        if trainer.accumulate_grad_batches > 1 and any(group["mc_samples"] != 1 for group in optimizer.param_groups):
            raise ValueError(f"{self.name}: IVON.mc_samples must be 1 with accumulate_grad_batches.")
        warn_of_clipping(self.name, trainer.gradient_clip_val, "Trainer(gradient_clip_val=None)")
        self.joint(pl_module)  # fails now rather than after the training

    def _optimizer(self, trainer: Any) -> IVON:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"{self.name} needs one optimizer. Got {len(trainer.optimizers)}. {_IVON}")
        return ivon_of(self.name, trainer.optimizers[0], _IVON)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Draw the weights for a micro-batch that Lightning runs outside of the optimiser."""
        last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        steps = last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if pl_module.automatic_optimization and not steps:
            self._draw.begin(self._optimizer(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Put the means back; the gradients stay, and the next micro-batch of the step has the same draw."""
        self._draw.drop(keep_gradients=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Drop a draw whose batch was skipped."""
        self._draw.drop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the means back."""
        self._draw.drop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the posterior."""
        self._posterior = self._optimizer(trainer).posterior(self.joint(pl_module), self.network(pl_module))


class LightningLaplace(Hooks):
    """A Lightning callback that runs `method`, a Laplace approximation by default, at the weights after training.

    `problem` is a function that makes the joint of the module, which is called as in prediction, `module(inputs)`; or
    of what `network` makes of the module. `data` are the training rows, as `infer` takes them; without, the Trainer's
    own loader. `posterior` and `trace` are those of `infer`.

    **Math**: `infer(method, problem(module), data)` at the end of training: see `posterity.methods.Laplace`.

    **Limit**: training must have come near a mode of the joint: its loss the negative log-likelihood, its weight decay
    that of the prior. The loader must give every row once, without augmentation.

    **Cost**: one pass over the rows, and the curvature of each.

    **References**: Daxberger et al. (2021), Laplace redux.

    **Example** (needs lightning):

        callback = po.integrations.LightningLaplace(
            lambda net: po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=1000)
        )
        lightning.Trainer(max_epochs=10, callbacks=[callback]).fit(module, loader)
        callback.posterior.predict(inputs).probs
    """

    base = _CALLBACK

    def __init__(
        self,
        problem: AsProblem,
        method: Method | None = None,
        *,
        data: object = None,
        seed: int = 0,
        network: AsNetwork | None = None,
    ) -> None:
        super().__init__(problem, network)
        self._method, self._data, self._seed = method or Laplace(), data, seed
        self.trace: Trace | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the problem takes the rows, before the training."""
        joint = self.joint(pl_module)
        joint.check_rows(data_of(joint, _rows(self, trainer, self._data)).to(joint.device))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the posterior."""
        rows = _rows(self, trainer, self._data)
        self._posterior, self.trace = infer(self._method, self.joint(pl_module), rows, seed=self._seed)


class LightningSWAG(Hooks):
    """A Lightning callback that collects the weights while the module trains: the posterior of SWAG.

    After the first `warmup` optimiser steps the weights are collected `every` so many. `rank` and `scale` are those of
    `posterity.methods.SWAG`. `problem` is a function that makes the joint of the module, which is called as in
    prediction, `module(inputs)`; or of what `network` makes of the module. Checkpoints of the Trainer hold the
    moments, so that a resumed training continues them.

    **Math**: see `posterity.methods.SWAG`; the weights come from the module's own training.

    **Limit**: the width of the posterior is that of the wandering of SGD at its step size, which must not fall to zero
    while weights are collected; Adam has no such reading. The noise of the likelihood must be given. Batch norm: its
    statistics at the mean come from one pass after training over `data`, or the Trainer's own loader; its batches must
    then be (inputs, targets).

    **Cost**: (`rank` + 5) times the size of the weights in memory, and a copy of the module.

    **References**: Maddox et al. (2019), A simple baseline for Bayesian uncertainty in deep learning.

    **Example** (needs lightning):

        callback = po.integrations.LightningSWAG(
            lambda net: po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=1000),
            warmup=2000,
        )
        lightning.Trainer(max_epochs=100, callbacks=[callback]).fit(module, loader)
        callback.posterior.predict(inputs).probs
    """

    base = _CALLBACK

    def __init__(
        self,
        problem: AsProblem,
        *,
        every: int = 20,
        warmup: int = 0,
        rank: int = 20,
        scale: float = 1.0,
        data: object = None,
        network: AsNetwork | None = None,
    ) -> None:
        super().__init__(problem, network)
        positive_whole(f"{self.name}.every", every)
        whole(f"{self.name}.warmup", warmup)
        whole(f"{self.name}.rank", rank)
        self._every, self._warmup, self._data = every, warmup, data
        # Lightning takes the steps of this fit; the method's own begin with its last pass.
        fit = MAP(steps=max(2, rank), batch_size=128, optimizer=SGD(1.0))
        self._method = SWAG(fit, every=1, rank=rank, warmup=0, scale=scale)
        self._joint: Joint | None = None
        self._state: SWAGState | None = None
        self._stored: dict[str, Any] = {}
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the joint, and begin the moments or continue those of a checkpoint."""
        joint = self.joint(pl_module)
        if joint.likelihood.chosen == LEFT_OUT or joint.likelihood.num_free:
            raise ValueError(
                f"{self.name}: the noise must be given, since no fit chooses it. Got {joint.likelihood}. Give the "
                "error of the network on rows that it was not trained on: Gaussian(scale=...)."
            )
        if joint.network.running:
            joint.check_rows(data_of(joint, _rows(self, trainer, self._data)).to(joint.device))
        state = self._method.init(joint, joint.initial(), Key(0))
        stored: Any = {name: v.to(joint.device) if isinstance(v, Tensor) else v for name, v in self._stored.items()}
        self._joint, self._state, self._step = joint, state._replace(**stored), trainer.global_step
        self._stored = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Collect the weights, if an optimiser step has been taken whose turn it is."""
        assert self._state is not None
        if trainer.global_step == self._step:  # a micro-batch
            return
        self._step = trainer.global_step
        since = self._step - self._warmup
        if since > 0 and since % self._every == 0:
            assert self._joint is not None
            self._state = self._method.collect(self._joint, self._at(pl_module))

    def _at(self, module: nn.Module) -> SWAGState:
        """The state at the module's present weights and statistics."""
        assert self._joint is not None
        assert self._state is not None
        network, own = self._joint.network, self.network(module)
        weights, buffers = dict(own.named_parameters()), dict(own.named_buffers())
        with torch.no_grad():
            theta = network.layout.flatten({name: weights[name].detach() for name in network.layout.names})
            running = {name: buffers[name].clone() for name in network.running}
        fit = self._state.fit._replace(theta=theta, buffers=running, step=self._method.fit.steps)
        return self._state._replace(fit=fit)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the posterior, with batch-norm statistics at the mean."""
        assert self._joint is not None
        joint, state, wanted = self._joint, self._at(pl_module), max(2, self._method.rank)
        if state.collected < wanted:
            self._posterior = (
                f"{self.name} must collect at least {wanted} weight vectors (2, or its rank). Got {state.collected} "
                f"from {self._step} steps, one every {self._every} after the first {self._warmup}. Use more steps, or "
                "a smaller every, warmup or rank."
            )
            logger.warning("%s", self._posterior)
            return
        if joint.network.running:
            rows = joint.checked(data_of(joint, _rows(self, trainer, self._data)).to(joint.device))
            for batch in self._method.batches(rows, Key(0)).from_step(self._method.fit.steps):
                assert batch is not None
                state, _ = self._method.step(joint, state, batch, Key(0))
        self._posterior = self._method.posterior(joint, [self._method.keep(state)])

    def state_dict(self) -> dict[str, Any]:
        """Return the moments, for a checkpoint of the Trainer."""
        return {} if self._state is None else {name: getattr(self._state, name) for name in _MOMENTS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the moments of a checkpoint, once training starts."""
        self._stored = dict(state_dict)


def _rows(callback: Hooks, trainer: Any, data: object) -> object:
    """The training rows: those that were given, or the Trainer's own loader."""
    if data is None and trainer.world_size > 1:
        raise ValueError(
            f"{callback.name}: the loader of a process has a share of the rows alone. Give all of them: "
            f"{callback.name}(..., data=loader)."
        )
    return trainer.train_dataloader if data is None else data
