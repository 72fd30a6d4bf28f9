"""IVON, a variational optimiser for training loops written by the user."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from posterity.numerics.random import Key
from posterity.optim.online_newton import Slab, check_group, first_share, step_settings

if TYPE_CHECKING:
    from posterity.model.joint import Joint
    from posterity.posteriors.gaussian import Gaussian

logger = logging.getLogger("posterity")

_JUMP = 0.1  # standard deviations that means may jump by, unsaid
_MEMORY = 0.1  # share of hess_init in a Hessian above which a posterior warns


class IVON(torch.optim.Optimizer):
    """Improved variational online Newton: a torch optimiser that learns a Gaussian over the weights.

    **Math**: q(w) = prod N(m, s^2) with s^2 = 1 / (ess (h + d)), d = `weight_decay`. At draws w = m + s eps with
    gradients g of a loss that is a mean over rows, h^ = g eps / s ("price"; or ess g^2, "gradsq"), and

    - v <- b1 v + (1 - b1) g
    - h <- b2 h + (1 - b2) h^ + (1 - b2)^2 (h - h^)^2 / (2 (h + d))
    - m <- m - lr (v / (1 - b1^t) + d m) / (h + d), the fraction between -clip_radius and clip_radius.

    With `rescale_lr` the step is also multiplied by hess_init + d, so that the first is a step of SGD; `debias=False`
    leaves 1 - b1^t out. It ascends the ELBO of a problem whose loss is -log p per row when `ess` is num_data and d =
    1 / (num_data prior_scale^2); tempered: ess = likelihood_power num_data, d by `Tempering.weight_decay`.

    **Defaults**: with `hess_init` left out h starts at 1, or at the root mean square of the first gradients if that is
    larger, and the step is multiplied by nothing: a steep loss, as of a regression with little noise, takes steps of
    about lr at first. With `beta2` left out it is 1 - 4 / (4000 + t), at most 0.99999, so that h is a mean over the
    later part of a run. `lr` should fall to zero: at a constant one the means jump by (lr / 2)^1/2 standard deviations,
    and `posterior` says so.

    Names follow the package ivon-opt (there hess_init is 1 and beta2 0.99999). The differences: weights return to the
    means after an exception; frozen parameters do not move; parameters without a gradient keep their state; gradients
    are read in `step`, so that clipping and a `GradScaler` act on them; a closure need not open the context; a restored
    `state_dict` resumes bit for bit; and the noise depends on `seed` and the step alone, never on torch's own
    generator.

    **Samples**: each `with opt.sampled_params(train=True)` is one draw, and `step` averages over the draws since the
    last step. Micro-batches of one large batch share a context, with several `backward` calls in a row. With several
    samples, clip gradients inside each context, at its end: outside, only the last sample's gradients remain.

    **Processes**: all draw the same noise from the same seed, so DistributedDataParallel averages gradients at one
    draw: mean and Hessian move as in one process with the whole batch. Nothing else is exchanged, so `sync` must be
    False.

    **CUDA graphs**: with `capturable` a context and its `step` may be recorded as a CUDA graph and replayed:

        opt = IVON(net.parameters(), lr=torch.tensor(0.1, device="cuda"), ess=50_000, capturable=True)
        ...  # some steps on a side stream, as torch.cuda.graph needs them
        for generator in opt.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            with opt.sampled_params(train=True): ...
            opt.step()

    Counts of steps are tensors then, and so is an `lr` that a scheduler is to change; other settings stay as recorded.
    The noise comes from `generators`, one for each group: not the plain form's numbers, but as reproducible, and part
    of the `state_dict`. Load a state before recording, since a graph keeps to its memory. A GradScaler is refused.

    **Limit**: a local optimum of the ELBO of a factorised Gaussian, in a run that is long for b2: hess_init is left to
    b2^t after t steps, or (4000 / (4000 + t))^4 by default. The noise of h^ is large; hence b2 near 1, and
    `ess` above num_data (a colder posterior) or a larger `hess_init` where training is unstable.

    **Cost**: one normal number per weight and draw, and some fifteen passes over vectors of the weights' size, five of
    which are kept.

    **References**: Shen et al. (2024), Variational learning is effective for large deep networks, Algorithm 1.

    **Example**:

    >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
    >>> net = nn.Linear(1, 1)
    >>> opt = IVON(net.parameters(), lr=0.1, ess=50, beta2=0.99, weight_decay=0.02)
    >>> for _ in range(1000):
    ...     with opt.sampled_params(train=True):
    ...         opt.zero_grad()
    ...         loss = 0.5 * (net(x) - 2 * x).square().mean()
    ...         loss.backward()
    ...     opt.step()
    >>> bool(abs(net.weight - 2 * 0.347 / (0.347 + 0.02)) < 0.1)  # the penalised mean of x^2 = 0.347
    True
    """

    # GradScaler then leaves unscaling to `step`, which knows how many samples there are.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        ess: float,
        hess_init: float | None = None,
        beta1: float = 0.9,
        beta2: float | None = None,
        weight_decay: float = 1e-4,
        mc_samples: int = 1,
        hess_approx: str = "price",
        clip_radius: float = math.inf,
        sync: bool = False,
        debias: bool = True,
        rescale_lr: bool = True,
        *,
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        """Take parameters or parameter groups; every setting may differ by group."""
        if sync:
            raise ValueError(
                "IVON.sync must be False. Processes draw the same noise here, so that averaged gradients are enough: "
                "wrap the model in DistributedDataParallel."
            )
        rates = {"lr": lr, "ess": ess, "hess_init": hess_init, "beta1": beta1, "beta2": beta2}
        estimate = {"weight_decay": weight_decay, "mc_samples": mc_samples, "hess_approx": hess_approx}
        options = {"clip_radius": clip_radius, "debias": debias, "rescale_lr": rescale_lr, "seed": seed}
        counts = {"capturable": capturable, "step": 0, "predictions": 0}
        self._generators: dict[int, torch.Generator] = {}  # of capturable groups
        super().__init__(params, {**rates, **estimate, **options, **counts})

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        state = dict(super().__getstate__())
        return {**state, "param_groups": self._with_noise(state["param_groups"])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("capturable", False)
        self._generators = {}
        self._forget_layout()

    def _forget_layout(self) -> None:
        self._slabs: list[list[Slab]] = []  # by group
        self._count = 0  # training samples since the last step
        self._pending = False  # whether the last of them is still in the parameters' gradients
        self._inside: str | None = None  # what has moved the weights: "context" or "closure"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the settings and add a group; samples that no step has used are dropped."""
        self._refuse_inside("add_param_group")
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])
        self._forget_layout()

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Draw the weights from q inside the context and restore the means after it, even after an exception.

        With `train`, the gradients at its end go into the next `step`; a context left by an exception does not count,
        and its gradients are cleared.
        """
        if self._inside == "closure" and train:
            yield  # `step` has drawn already
            return
        if self._inside is not None:
            raise RuntimeError("IVON.sampled_params: the weights are drawn already. Leave the other context first.")
        self._collect()
        try:
            self._inside = "context"
            self._draw(train)
            try:
                yield
            except BaseException:
                if train:
                    self.zero_grad()
                raise
        finally:
            self._inside = None
            with torch.no_grad():
                for slab in self._all():
                    slab.restore()
        if train:
            self._count += 1
            self._pending = True

    @torch.no_grad()
    def _draw(self, train: bool) -> None:
        """Move all weights by noise that depends on the seed, the step and the sample's number alone.

        In capturable groups it depends on the number of all samples so far.
        """
        self._lay_out()
        for index, (group, slabs) in enumerate(zip(self.param_groups, self._slabs, strict=True)):
            if train and group["capturable"]:
                for slab in slabs:
                    slab.draw(self._generator(index), group["ess"])
                continue
            if train:
                label = f"step {group['step']} sample {self._count}"
            else:
                label = f"prediction {group['predictions']}"
                group["predictions"] += 1
            for number, slab in enumerate(slabs):
                key = Key(group["seed"]).fold(f"{label} group {index} {number}")
                slab.draw(key.generator(slab.noise.device), group["ess"])

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of the noise of capturable groups, which a CUDA graph must register to record a step."""
        self._settle()
        return [self._generator(index) for index, group in enumerate(self.param_groups) if group["capturable"]]

    def _generator(self, index: int) -> torch.Generator:
        """Return the generator of a capturable group, which begins by seed and step, or at the state that was saved."""
        group = self.param_groups[index]
        device = group["step"].device
        if index not in self._generators or self._generators[index].device != device:
            key = Key(group["seed"]).fold(f"recorded from step {int(group['step'])} group {index}")
            generator = self._generators[index] = key.generator(device)
            saved = group.pop("noise", None)
            if saved is not None and len(saved) == len(generator.get_state()):  # else it is of another device
                generator.set_state(saved.cpu())
        return self._generators[index]

    def _with_noise(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the parameter groups, capturable ones with the state of their generator."""
        return [
            {**group, "noise": self._generator(index).get_state()} if group["capturable"] else group
            for index, group in enumerate(groups)
        ]

    @torch.no_grad()
    def _collect(self) -> None:
        """Add the gradients of the last sample to the sums, before another sample."""
        if self._pending and not any(slab.with_gradient() for slab in self._all()):
            self._count, self._pending = self._count - 1, False  # a context without gradients does not count
        if self._pending:
            for group, slabs in zip(self.param_groups, self._slabs, strict=True):
                for slab in slabs:
                    slab.collect(group["hess_approx"] == "gradsq")
            self._pending = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, after adding those of an unused sample to the sums."""
        self._collect()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move means and Hessian by the samples since the last step; return the closure's mean loss, if given.

        A closure is called `mc_samples` times, each at a fresh draw; it clears gradients, computes the loss and calls
        backward.
        """
        self._refuse_inside("step")
        loss: Any = None
        if closure is not None:
            losses = []
            for _ in range(self.param_groups[0]["mc_samples"]):
                with self.sampled_params(train=True), torch.enable_grad():
                    self._inside = "closure"
                    losses.append(closure())
            loss = None if any(value is None for value in losses) else sum(losses) / len(losses)
        if not self._count:
            raise RuntimeError(
                "IVON.step needs gradients at drawn weights. Compute the loss and call backward inside "
                "`with optimizer.sampled_params(train=True):`, or pass step a closure that does both."
            )
        scale = self._grad_scale()
        if scale is not None:
            self._update(scale)
        self._count, self._pending = 0, False
        for slab in self._all():
            slab.forget()
        return loss

    def _grad_scale(self) -> float | None:
        """Return the factor of a GradScaler on the gradients; None if some are not finite."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is None:
            return 1.0
        if any(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                "IVON: a GradScaler needs capturable=False, since it must read whether gradients are finite. Use "
                "torch.autocast with bfloat16, which needs no GradScaler."
            )
        if scale is None and self._count > 1:
            raise RuntimeError(
                "IVON: GradScaler.unscale_ has seen the last of several samples alone. Leave it out, or sample once."
            )
        if bool(found_inf) or not all(slab.finite_sums() for slab in self._all()):  # it checked the last sample alone
            return None
        return 1.0 if scale is None else float(scale)

    @torch.no_grad()
    def _update(self, scale: float) -> None:
        if self._count > 1:
            self._collect()
        elif self._pending and not any(slab.with_gradient() for slab in self._all()):
            raise RuntimeError(
                "IVON: no parameter has a gradient. Call loss.backward() inside the sampled_params context, and "
                "optimizer.zero_grad() before it rather than model.zero_grad() after it."
            )
        for group, slabs in zip(self.param_groups, self._slabs, strict=True):
            if group["hess_init"] is None and not all(slab.begun for slab in slabs):
                known = [slab.gradient_squares(self._count, scale) for slab in slabs]
                squares = torch.stack([part.to(known[0][0].device) for part, _ in known]).sum()
                hessian = (squares / max(1, sum(number for _, number in known))).sqrt().clamp(min=1.0)
                for slab in slabs:
                    slab.begin(hessian, group["hess_approx"] == "gradsq")
            group["step"] += 1
            settings = step_settings(group)
            for slab in slabs:
                slab.update(settings, self._count, scale)
                slab.begun = True

    def _warn_of_first_precisions(self) -> None:
        """Log a warning where hess_init still makes up more than a tenth of a Hessian, or the means still jump."""
        for group in self.param_groups:
            steps = int(group["step"])
            share = first_share(group["beta2"], steps)
            if share > _MEMORY:
                enough = next(2**power for power in range(40) if first_share(group["beta2"], 2**power) <= _MEMORY)
                logger.warning(
                    "IVON.posterior: after %d steps with beta2=%s the Hessian is %.0f %% its start, hess_init=%s, and "
                    "so are the precisions. Take some %d steps, or beta2=%.4g for as many as these.",
                    steps,
                    group["beta2"],
                    100 * share,
                    group["hess_init"],
                    enough,
                    _MEMORY ** (4.0 / max(1, steps)),
                )
                return
        jump = math.sqrt(0.5 * max(float(step_settings(group).lr) for group in self.param_groups))
        if jump > _JUMP:
            logger.warning(
                "IVON.posterior: at the present lr the means still jump by some %.2g standard deviations. Let lr fall "
                "to zero over the run, as by torch.optim.lr_scheduler.CosineAnnealingLR.",
                jump,
            )

    def _refuse_inside(self, verb: str) -> None:
        if getattr(self, "_inside", None) is not None:
            raise RuntimeError(f"IVON.{verb}: call it after the sampled_params context, not in it.")

    def _all(self) -> Iterator[Slab]:
        return (slab for slabs in self._slabs for slab in slabs)

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Make flat vectors for the parameters as they are now, with their state so far."""
        if _recording():
            if not all(group["capturable"] for group in self.param_groups):
                raise RuntimeError("IVON: a step in a CUDA graph needs IVON(..., capturable=True). Got False.")
            if not self._slabs or not all(slab.begun for slab in self._all()):
                raise RuntimeError("IVON: take a step before recording one, which keeps to the memory of that step.")
        if len(self._slabs) != len(self.param_groups) or not all(slab.fits for slab in self._all()):
            if self._count:
                raise RuntimeError("IVON: a parameter has changed its device or dtype between sample and step.")
            with torch.inference_mode(False):  # an evaluation may come first, and steps must be able to write
                self._slabs = [self._slabs_of(group) for group in self.param_groups]
        for group, slabs in zip(self.param_groups, self._slabs, strict=True):
            for slab in slabs:
                slab.settle(group["weight_decay"])

    def _slabs_of(self, group: dict[str, Any]) -> list[Slab]:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in group["params"]:
            kinds.setdefault((p.device, p.dtype), []).append(p)
        steps = int(group["step"])
        if group["capturable"]:
            devices = sorted({str(device) for device, _ in kinds})
            if len(devices) != 1:
                raise ValueError(f"IVON: a capturable group must have parameters on one device. Got {devices}.")
            group["step"] = torch.full((), steps, dtype=torch.float64, device=devices[0])
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(devices[0])
        slabs = []
        for parameters in kinds.values():
            slab = Slab(parameters, group["hess_init"] or 1.0, group["weight_decay"], steps > 0)
            slab.load([self.state[p] for p in parameters])
            for p, curvature, momentum in zip(parameters, slab.curvatures, slab.momenta, strict=True):
                self.state[p] = {"curvature": curvature, "momentum": momentum}
            slabs.append(slab)
        return slabs

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does: "curvature" (h + weight_decay) and "momentum" for each parameter."""
        self._settle()
        state = super().state_dict()
        return {**state, "param_groups": self._with_noise(state["param_groups"])}

    def _settle(self) -> None:
        """Between steps, bring the curvature to the group's weight decay, with which it will be read."""
        if not self._count and self._inside is None:
            self._lay_out()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state, bit for bit where the weights are restored too; unused samples are dropped."""
        self._refuse_inside("load_state_dict")
        # "differentiable" is added by torch on loading, and "capturable" does not belong to the state.
        wanted = [name for name in self.defaults if name not in ("differentiable", "capturable")]
        missing = [name for group in state_dict["param_groups"] for name in wanted if name not in group]
        if missing:
            raise ValueError(f"IVON.load_state_dict: the state must be IVON's. Got one without {missing[0]!r}.")
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for saved in (state_dict["state"].get(name, {}) for name in names):
            if saved and {*saved} != {"curvature", "momentum"}:
                raise ValueError(f"IVON.load_state_dict: the state must be IVON's. Got one with {[*saved]}.")
        forms = [(group["capturable"], group["lr"]) for group in self.param_groups]
        super().load_state_dict(state_dict)
        self._generators = {}
        self._forget_layout()
        for group, (capturable, lr) in zip(self.param_groups, forms, strict=True):
            rate, noise = float(group["lr"]), group.pop("noise", None)
            group.update(capturable=capturable, step=int(group["step"]), lr=rate)
            if capturable:
                group["noise"] = noise
            if isinstance(lr, Tensor):
                group["lr"] = lr.fill_(rate)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for name, p in zip(names, parameters, strict=True):
            if name in state_dict["state"]:  # as saved: torch casts it to the parameter's dtype
                saved = state_dict["state"][name]
                self.state[p] = {key: value.detach().to(p.device, copy=True) for key, value in saved.items()}

    @torch.no_grad()
    def posterior(self, joint: "Joint", module: nn.Module) -> "Gaussian":
        """Return q over the weights of `joint`, whose network is this module, for predictions and metrics.

        Means and buffers come from the module, by name; precisions are ess (h + weight_decay). Every random weight of
        the joint must be a parameter of this optimiser. A warning in the log says so where the run was too short for
        its beta2: then the precisions are mostly the first ones.
        """
        from posterity.posteriors.gaussian import gaussian

        self._refuse_inside("posterior")
        self._warn_of_first_precisions()
        self._lay_out()
        pairs = ((group["ess"], p) for group in self.param_groups for p in group["params"])
        return gaussian(joint, module, {p: ess * self.state[p]["curvature"].double() for ess, p in pairs})


def _recording() -> bool:
    """Return whether work on the current device goes into a CUDA graph."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
