"""IVON under the `Trainer` of Hugging Face."""

from typing import Any

from torch import nn

from posterity.integrations.hooks import AsNetwork, AsProblem, Draw, Hooks, ivon_of, warn_of_clipping
from posterity.optim.ivon import IVON

_IVON = "Pass Trainer(..., optimizers=(IVON(model.parameters(), lr=..., ess=...), None))."


class HuggingFaceIVON(Hooks):
    """A `TrainerCallback` that lets `posterity.optim.IVON` train a model of Hugging Face, and makes the posterior.

    `problem` is a function that makes the joint of the trained network, called at the end of training: of the model, or
    of what `network` makes of it. Its inputs are the keyword arguments of the model.

    **Math**: each optimiser step has one draw of the weights, at which all its micro-batches
    (`gradient_accumulation_steps`) are evaluated. Before the step the means are back: evaluations, checkpoints and the
    model after training have them. A run is that of a plain loop with the same batches, bit for bit.

    **Limit**: the Trainer's loss must be a mean over rows: then `ess` is the number of rows, and `weight_decay` is
    1 / (ess prior_scale^2). With a loss per token, `ess` is the number of tokens. `max_grad_norm` should be 0: the
    Hessian of clipped gradients is too small. `load_best_model_at_end` is refused, as means and Hessian would be those
    of different steps. The Trainer does not tell callbacks of an exception: after one, `restore` puts the means back.

    **Cost**: see `posterity.optim.IVON`.

    **References**: Shen et al. (2024), Variational learning is effective for large deep networks.

    **Example** (needs transformers and accelerate):

        optimizer = po.optim.IVON(model.parameters(), lr=0.1, ess=len(rows), weight_decay=1 / len(rows))
        callback = po.integrations.HuggingFaceIVON(
            lambda net: po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=len(rows))
        )
        arguments = TrainingArguments("folder", max_grad_norm=0.0)
        Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None), callbacks=[callback]).train()
        callback.posterior.predict({"input_ids": ids, "attention_mask": mask}).probs
    """

    base = ("transformers", "TrainerCallback")

    def __init__(self, problem: AsProblem, *, network: AsNetwork | None = None) -> None:
        super().__init__(problem, network)
        self._draw = Draw()
        self._optimizer: IVON | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Check what the Trainer was given."""
        self._optimizer = ivon_of(self.name, getattr(optimizer, "optimizer", optimizer), _IVON)
        if any(group["mc_samples"] != 1 for group in self._optimizer.param_groups):
            raise ValueError(f"{self.name} draws once a step: IVON.mc_samples must be 1 under a Trainer.")
        if args.load_best_model_at_end:
            raise ValueError(
                f"{self.name}: load_best_model_at_end would join the means of one step to the Hessian of another. "
                "Leave it out, and let lr fall to zero."
            )
        warn_of_clipping(self.name, args.max_grad_norm, "TrainingArguments(max_grad_norm=0.0)")
        self.joint(model)  # fails now rather than after the training

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Draw the weights, before the first micro-batch of a step."""
        assert self._optimizer is not None
        self._draw.begin(self._optimizer)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the means back, before the optimiser moves them."""
        self._draw.end()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop a draw whose step was given up, before an evaluation."""
        self._draw.drop()

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Make the posterior."""
        assert self._optimizer is not None
        self._draw.drop()
        self._posterior = self._optimizer.posterior(self.joint(model), self.network(model))

    def restore(self) -> None:
        """Put the means back after an exception in `Trainer.train`."""
        self._draw.drop()
