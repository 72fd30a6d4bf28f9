"""A language model of GPT-2 small's size with adapters: IVON against AdamW, Laplace in epochs, and calibration.

    python -m benchmarks.language_model
    python -m benchmarks.language_model --tiny

A transformer of 124 M weights in plain torch is pre-trained for some seconds on bytes of the Python standard library;
then adapters of rank 8 on queries and values are fine-tuned on some packages by AdamW and by `optim.IVON`, and
`methods.Laplace` takes Kronecker factors of the adapters. Costs come first, at random weights, whose values do not
matter to them: a whole step (draw, forward, backward, update) and peak memory against AdamW's, and the Laplace fit
against an epoch of AdamW on the same rows. Settings are chosen on validation windows of the fine-tuning modules;
scores are of modules left out of all training. Results are written after each stage. `--tiny` is for a CPU.
"""

import argparse
import contextlib
import copy
import dataclasses
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.language_model_parts import Corpus, Rows, Shape, Transformer, adapters, averaged, corpus, loss, put
from benchmarks.memory import MEBIBYTE
from posterity.posteriors import Gaussian
from posterity.predictive import ClassPredictive

ADAMW, IVON, EPOCH = "AdamW", "posterity IVON", "AdamW, one epoch"
FITS = {
    "posterity Laplace, one drawn label, bf16": (po.curvature.MonteCarloFisher(1), "bf16"),
    "posterity Laplace, one drawn label": (po.curvature.MonteCarloFisher(1), None),
    "posterity Laplace, four random columns, bf16": (po.curvature.GaussNewton(), "bf16"),
}
KEPT = next(iter(FITS))  # the fit that is scored
RATES = (1e-3, 3e-3, 1e-2, 3e-4)  # of AdamW, to choose from
IVON_RATES, IVON_HESSIANS, COLD = (1.0, 3.0, 0.3), (1e-2, 1e-1), (10.0, 100.0)
PRIOR_SCALES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
COVERAGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TINY = {
    **{"layers": 2, "heads": 2, "width": 32, "context": 32, "vocabulary": 300, "rank": 2, "pretraining_steps": 30},
    **{"pretraining_batch": 8, "rows": 16, "validation": 8, "held_out": 8, "batch": 8, "epochs": 2, "draws": 2},
    **{"rounds": 1, "steps": 1, "candidates": 2, "seconds": 50.0},
}


class Study:
    """The stages of the benchmark, what they have found so far, and the time that is left."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen, self.began = chosen, time.perf_counter()
        self.device = torch.device(chosen.device)
        self.comparisons: list[Comparison] = []
        self.facts: dict[str, Any] = {"stages": {}}
        self.scores: dict[str, dict[str, Any]] = {}
        self.about = context(chosen)
        if self.device.type == "cuda":
            self.about["machine"]["gpu"] = torch.cuda.get_device_name(self.device)
        self.shape = Shape(*(getattr(chosen, field.name) for field in dataclasses.fields(Shape)))
        self.corpus: Corpus
        self.module: Transformer
        self.tuned: dict[str, dict[str, Any]] = {
            ADAMW: {"lr": 1e-3},
            IVON: {"lr": 1.0, "hess_init": 1e-2, "cold": 10.0},
        }
        self.draws: dict[str, dict[str, Tensor]] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def left(self, share: float) -> bool:
        """Whether this share of the time is not over yet."""
        return self.elapsed < share * self.chosen.seconds

    def say(self, words: str) -> None:
        """Tell about progress."""
        print(f"[{self.elapsed:6.1f} s] {words}", file=sys.stderr, flush=True)

    def run(self, name: str, stage: Callable[[], None]) -> None:
        """Run a stage, and write what is known after it, whether it fails or not."""
        self.say(f"{name} ...")
        began, error = self.elapsed, ""
        try:
            stage()
            self.synchronize()
        except Exception as failure:
            error = " ".join(f"{type(failure).__name__}: {failure}".split())
            traceback.print_exc()
        self.facts["stages"][name] = {"seconds": self.elapsed - began, "error": error}
        self.say(f"{name}: {error or 'done'} ({self.elapsed - began:.1f} s)")
        self.write()

    def write(self) -> None:
        """Write the results so far."""
        facts = {**self.facts, "held out": self.scores}
        with contextlib.redirect_stdout(None):  # `main` prints the last of them
            write(
                "language_model", self.comparisons, self.about, facts, self.notes(), self.chosen.results, self.table()
            )

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measured(self, call: Callable[[], Any], peaks: dict[str, float], name: str) -> Callable[[], Any]:
        """The call, ending when the device has; its peak of allocated memory, in MiB, is noted once."""

        def finished() -> Any:
            result = call()
            self.synchronize()
            return result

        finished()  # libraries take their workspaces in a first call
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            finished()
            peaks[name] = torch.cuda.max_memory_allocated() / MEBIBYTE
        return finished

    # Data and model

    def read(self) -> None:
        """Read the sources and make the model."""
        given = self.chosen
        self.corpus = corpus(self.shape.context, given.rows, given.validation, given.held_out, given.seed, self.device)
        torch.manual_seed(given.seed)
        self.module = Transformer(self.shape).to(self.device)
        self.facts["weights"] = sum(p.numel() for p in self.module.parameters())
        self.facts["corpus"] = {
            **self.corpus.facts,
            **{f"{name}, windows": len(getattr(self.corpus, name)) for name in ("pretraining", "held_out")},
        }

    def adapted(self, module: Transformer) -> Transformer:
        """A copy with new adapters."""
        module = copy.deepcopy(module)
        torch.manual_seed(self.chosen.seed)
        module.adapt(self.shape.rank)
        return module

    def batches(self, epochs: int) -> list[Rows]:
        """Rows of fine-tuning in the order of training, the same for everybody."""
        generator = torch.Generator().manual_seed(self.chosen.seed)
        rows = self.corpus.fine_tuning
        orders = [torch.randperm(len(rows), generator=generator).to(self.device) for _ in range(epochs)]
        return [rows[part] for order in orders for part in order.split(self.chosen.batch)]

    def pretrain(self) -> None:
        """AdamW on all weights, with warm-up and a cosine, by time or by steps."""
        given, module, rows = self.chosen, self.module, self.corpus.pretraining
        optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=given.pretraining_lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=self.device.type == "cuda",
        )
        generator, began, step, done = torch.Generator().manual_seed(given.seed), time.perf_counter(), 0, 0.0
        while done < 1.0:
            rate = min(1.0, done / 0.05, 0.5 + 0.5 * math.cos(math.pi * done)) if step else 0.0
            optimizer.param_groups[0]["lr"] = given.pretraining_lr * max(rate, 0.01)
            index = torch.randint(len(rows), (given.pretraining_batch,), generator=generator).to(self.device)
            batch = rows[index]
            optimizer.zero_grad()
            value = loss(module, batch.inputs, batch.targets)
            value.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 100 == 1:
                self.say(f"pre-training, step {step}: {value.item() / math.log(2):.3f} bits a byte")
            elif step % 10 == 0:
                self.synchronize()
            spent = (time.perf_counter() - began) / given.pretraining_seconds
            done = step / given.pretraining_steps if given.pretraining_steps else spent
        module.zero_grad(set_to_none=True)
        last = value.item() / math.log(2)
        tokens = step * given.pretraining_batch * self.shape.context
        self.facts["pre-training"] = {
            **{"steps": step, "tokens": tokens, "last loss, bits a byte": last},
            **{"epochs": tokens / (len(rows) * self.shape.context), "lr": given.pretraining_lr},
        }

    # Fine-tuning

    def adamw(self, module: Transformer, steps: int, lr: float) -> Callable[[Rows], Any]:
        """A step of AdamW on the adapters."""
        weights = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.01, fused=self.device.type == "cuda")
        fall = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=steps)

        def step(batch: Rows) -> None:
            optimizer.zero_grad()
            loss(module, batch.inputs, batch.targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            fall.step()

        return step

    def ivon(
        self, module: Transformer, steps: int, lr: float, hess_init: float, cold: float
    ) -> tuple[Callable[[Rows], Any], po.optim.IVON]:
        """A step of IVON on the adapters, and the optimiser."""
        tokens = self.corpus.fine_tuning.targets.numel()
        weights = [p for p in module.parameters() if p.requires_grad]
        settings: dict[str, Any] = {
            "lr": lr,
            "hess_init": hess_init,
            "ess": cold * tokens,
            "weight_decay": 1.0 / tokens,
        }
        optimizer = po.optim.IVON(weights, beta2=0.1 ** (4.0 / steps), seed=self.chosen.seed, **settings)
        fall = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=steps)

        def step(batch: Rows) -> None:
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                loss(module, batch.inputs, batch.targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            fall.step()

        return step, optimizer

    def fit(self, name: str, module: Transformer, settings: dict[str, Any]) -> dict[str, Tensor]:
        """Fine-tune from the start of the adapters; draws of them, a single one for AdamW."""
        batches = self.batches(self.chosen.epochs)
        if name == ADAMW:
            step = self.adamw(module, len(batches), **settings)
        else:
            step, optimizer = self.ivon(module, len(batches), **settings)
        for batch in batches:
            step(batch)
        module.zero_grad(set_to_none=True)
        if name == ADAMW:
            return adapters(module)
        return optimizer.posterior(self.joint(module), module).draws(self.chosen.draws, self.chosen.seed)

    def joint(self, module: Transformer, scale: float = 1.0) -> po.Joint:
        """The problem of the adapters."""
        network = po.Network(module, outputs=_classes_second)
        likelihood, prior = po.likelihoods.Categorical(positions=1), po.priors.Normal(scale=scale)
        return po.Joint(network, likelihood, prior, num_data=len(self.corpus.fine_tuning))

    def bits(self, module: Transformer, draws: dict[str, Tensor], rows: Rows) -> float:
        """Bits a byte of rows."""
        pred = ClassPredictive(averaged(module, draws, rows, self.chosen.batch))
        return po.metrics.negative_log_likelihood(pred, rows.targets.flatten().cpu()) / math.log(2)

    def fine_tune(self) -> None:
        """Choose settings on the validation windows, and keep the best fit of each."""
        module = self.module = self.adapted(self.module)
        begin = adapters(module)
        self.draws["before fine-tuning"] = begin
        self.facts["adapter weights"] = sum(p.numel() for p in begin.values())
        tried: list[dict[str, Any]] = []
        self.facts["settings tried"] = tried
        best: dict[str, float] = {}
        candidates: dict[str, list[dict[str, Any]]] = {
            ADAMW: [{"lr": lr} for lr in RATES],
            IVON: [
                {"lr": lr, "hess_init": hessian, "cold": cold}
                for cold, hessian, lr in itertools.product(COLD, IVON_HESSIANS, IVON_RATES)
            ],
        }
        for name, share in ((ADAMW, 0.6), (IVON, 0.75)):
            for settings in candidates[name][: self.chosen.candidates]:
                if name in best and not self.left(share):
                    break
                put(module, begin)
                draws = self.fit(name, module, settings)
                bits = self.bits(module, draws, self.corpus.validation)
                tried.append({"method": name, **settings, "validation bits a byte": bits})
                self.say(f"{name}, {settings}: {bits:.4f} bits a byte of validation windows")
                if bits < best.get(name, math.inf):
                    best[name], self.tuned[name], self.draws[name] = bits, settings, draws
        put(module, begin)
        self.facts["settings"] = self.tuned

    # Costs

    def steps(self) -> None:
        """Whole steps of AdamW and IVON on one model, in turn."""
        module, count, peaks = self.adapted(self.module), self.chosen.steps, dict[str, float]()
        batches = self.batches(1)

        def call(step: Callable[[Rows], Any]) -> Callable[[], None]:
            turns = itertools.cycle(batches)

            def several() -> None:
                for _ in range(count):
                    step(next(turns))
                module.zero_grad(set_to_none=True)

            return several

        ways: dict[str, Callable[[], Callable[[Rows], Any]]] = {
            ADAMW: lambda: self.adamw(module, 10_000, 1e-4),
            IVON: lambda: self.ivon(module, 10_000, **{**self.tuned[IVON], "lr": 1e-3})[0],
        }
        contenders = [
            Contender(name, partial(self._prepared, make, call, peaks, name), count) for name, make in ways.items()
        ]
        shape = self.shape
        found = compare(
            f"Step of fine-tuning, rank {shape.rank}: batch {self.chosen.batch} of {shape.context} bytes",
            contenders,
            limit=ADAMW,
            unit="step",
            rounds=self.chosen.rounds,
        )
        self.comparisons.append(dataclasses.replace(found, columns={"peak MiB": peaks} if peaks else {}))
        size = sum(p.numel() * p.element_size() for p in module.parameters() if not p.requires_grad)
        self.facts["frozen MiB"] = size / MEBIBYTE
        if peaks:
            self.facts["memory ratio"] = peaks[IVON] / peaks[ADAMW]

    def _prepared(
        self,
        make: Callable[[], Callable[[Rows], Any]],
        call: Callable[[Callable[[Rows], Any]], Callable[[], None]],
        peaks: dict[str, float],
        name: str,
    ) -> Callable[[], Any]:
        return self.measured(call(make()), peaks, name)

    def laplace(self, module: Transformer, name: str, scale: float = 1.0) -> Gaussian:
        """Kronecker factors of the adapters, without tuning."""
        curvature, precision = FITS[name]
        method = po.methods.Laplace(
            curvature, po.curvature.Kronecker(), po.methods.AllWeights(), None, self.chosen.batch
        )
        rows, joint = self.corpus.fine_tuning, self.joint(module, scale)
        q, _ = po.infer(
            method,
            joint,
            (rows.inputs, rows.targets),
            seed=self.chosen.seed,
            progress=False,
            precision=precision,  # type: ignore[arg-type]
        )
        gaussian = q.as_gaussian()
        assert gaussian is not None
        return gaussian

    def epochs(self) -> None:
        """Laplace fits against an epoch of AdamW on the same rows."""
        module, peaks = self.adapted(self.module), dict[str, float]()
        for batch in self.batches(1)[:4]:
            self.adamw(module, 4, 1e-3)(batch)
        batches, step = self.batches(1), self.adamw(module, 10_000, 1e-4)

        def epoch() -> None:
            for batch in batches:
                step(batch)
            module.zero_grad(set_to_none=True)

        contenders = [
            Contender(EPOCH, lambda: self.measured(epoch, peaks, EPOCH)),
            *(
                Contender(name, partial(self.measured, partial(self.laplace, module, name), peaks, name), peer=True)
                for name in FITS
            ),
        ]
        found = compare(
            f"Kronecker Laplace of the adapters: {len(self.corpus.fine_tuning)} rows of {self.shape.context} bytes",
            contenders,
            limit=EPOCH,
            unit="fit",
            rounds=min(self.chosen.rounds, 2),
        )
        self.comparisons.append(dataclasses.replace(found, columns={"peak MiB": peaks} if peaks else {}))

    # Scores

    def curve(self) -> None:
        """Laplace at the fine-tuned adapters; its prior scale by the validation windows, with draws of the weights."""
        put(self.module, self.draws[ADAMW])
        self.synchronize()
        began = time.perf_counter()
        gaussian = self.laplace(self.module, KEPT)
        self.synchronize()
        fitted, tried = time.perf_counter(), list[dict[str, float]]()
        best = math.inf
        for scale in PRIOR_SCALES:
            if tried and not self.left(0.9):
                break
            prior = torch.full((gaussian.precision.size,), scale**-2, dtype=torch.float64, device=self.device)
            trial = dataclasses.replace(gaussian, precision=gaussian.precision.rescaled(1.0, prior))
            draws = trial.draws(self.chosen.draws, self.chosen.seed)
            bits = self.bits(self.module, draws, self.corpus.validation)
            tried.append({"prior scale": scale, "validation bits a byte": bits})
            self.say(f"Laplace, prior scale {scale}: {bits:.4f} bits a byte of validation windows")
            if bits < best:
                best, self.draws["posterity Laplace"] = bits, draws
        self.synchronize()
        self.facts["Laplace"] = {
            "fit": KEPT,
            "seconds without tuning": fitted - began,
            "seconds with tuning": time.perf_counter() - began,
            "prior scales tried": tried,
        }

    def score(self) -> None:
        """Scores on modules left out of all training."""
        rows = self.corpus.held_out
        labels = rows.targets.flatten().cpu()
        for name, draws in self.draws.items():
            pred = ClassPredictive(averaged(self.module, draws, rows, self.chosen.batch))
            risk = po.metrics.risk_coverage(pred, labels)
            self.scores[name] = {
                "bits a byte": po.metrics.negative_log_likelihood(pred, labels) / math.log(2),
                "calibration error": po.metrics.expected_calibration_error(pred, labels),
                "accuracy": po.metrics.accuracy(pred, labels),
                "confidence": po.metrics.confidence(pred, labels),
                "area under risk-coverage": risk.area,
                "risk at coverage": {str(coverage): risk.at(coverage) for coverage in COVERAGES},
                "draws": len(next(iter(draws.values()))),
            }
            self.say(f"{name}: {self.scores[name]['bits a byte']:.4f} bits a byte of held-out modules")

    def table(self) -> Sequence[Sequence[str]]:
        """The scores as a table."""
        if not self.scores:
            return ()
        risks = [f"error at {coverage:.0%}" for coverage in (0.5, 0.8)]
        head = ["held-out modules", "draws", "bits a byte", "ECE", "accuracy", "confidence", "AURC", *risks]
        rows = []
        for name, score in self.scores.items():
            keys = ("bits a byte", "calibration error", "accuracy", "confidence", "area under risk-coverage")
            numbers = [score[key] for key in keys] + [score["risk at coverage"][key] for key in ("0.5", "0.8")]
            rows.append([name, str(score["draws"]), *(f"{number:.4f}" for number in numbers)])
        return [head, *rows]

    def notes(self) -> list[str]:
        """What the numbers are of, and the three ratios against their bounds."""
        facts, notes = self.facts, list[str]()
        where = self.about["machine"].get("gpu", "the CPU")
        if "corpus" in facts:
            known = facts["corpus"]
            notes.append(
                f"On {where}: {facts['weights']:,} weights, pre-trained on bytes of "
                f"{known['pre-training, modules']} modules; "
                f"{len(self.corpus.fine_tuning)} windows of {known['fine-tuning, modules']} modules for fine-tuning, "
                f"{len(self.corpus.validation)} to choose settings, {len(self.corpus.held_out)} of "
                f"{known['held-out, modules']} held-out modules."
            )
        if "pre-training" in facts:
            own = facts["pre-training"]
            notes.append(
                f"Pre-training: {own['steps']:,} steps, {own['tokens']:,} bytes ({own['epochs']:.1f} epochs), to "
                f"{own['last loss, bits a byte']:.3f} bits a byte of the last batch."
            )
        for comparison in self.comparisons:
            for timing in comparison.timings:
                if timing.name != comparison.limit:
                    bound = 1.3 if timing.name == IVON else 3.0
                    ratio = comparison.ratio_of_medians(timing.name)
                    verdict = "within" if ratio <= bound else "above"
                    notes.append(f"{timing.name}: {ratio:.2f} x {comparison.limit}, {verdict} {bound} x.")
        if "memory ratio" in facts:
            verdict = "within" if facts["memory ratio"] <= 1.3 else "above"
            notes.append(
                f"Peak memory of IVON: {facts['memory ratio']:.3f} x that of AdamW, {verdict} 1.3 x; the frozen "
                f"weights are {facts['frozen MiB']:.0f} MiB of both."
            )
        if "settings" in facts:
            notes.append(f"Settings with the fewest bits a byte on validation windows: {facts['settings']}.")
        if "Laplace" in facts:
            own = facts["Laplace"]
            notes.append(
                f"Laplace that is scored: {own['fit']}, {own['seconds without tuning']:.2f} s, "
                f"{own['seconds with tuning']:.2f} s "
                f"with the choice of a prior scale among {len(own['prior scales tried'])}."
            )
        failed = {name: stage["error"] for name, stage in facts["stages"].items() if stage["error"]}
        notes += [f"Stage {name!r} failed: {error}" for name, error in failed.items()]
        notes.append(
            "Seconds by stage: "
            + ", ".join(f"{name} {own['seconds']:.1f}" for name, own in facts["stages"].items())
            + "."
        )
        return notes


def _classes_second(logits: Tensor) -> Tensor:
    return logits.movedim(-1, 1)


def options() -> argparse.ArgumentParser:
    """The options; the defaults are for an H200."""
    words = parser(__doc__ or "")
    words.set_defaults(rounds=7)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--tiny", action="store_true", help="sizes for a CPU; options given beside it win")
    words.add_argument("--stages", default="", help="names of the stages to run, with commas (default: all)")
    words.add_argument("--seconds", type=float, default=330.0, help="time after which later stages do less")
    for field in dataclasses.fields(Shape):
        words.add_argument(f"--{field.name}", type=int, default=field.default)
    words.add_argument("--pretraining-seconds", type=float, default=100.0)
    words.add_argument("--pretraining-steps", type=int, default=0, help="steps, in place of seconds")
    words.add_argument("--pretraining-batch", type=int, default=32)
    words.add_argument("--pretraining-lr", type=float, default=6e-4)
    words.add_argument("--batch", type=int, default=16, help="rows in a step of fine-tuning")
    words.add_argument("--rows", type=int, default=512, help="windows for fine-tuning")
    words.add_argument("--validation", type=int, default=96, help="windows for settings")
    words.add_argument("--held-out", type=int, default=256, help="windows for scores")
    words.add_argument("--epochs", type=int, default=4, help="of fine-tuning")
    words.add_argument("--draws", type=int, default=8, help="of a posterior, for predictions")
    words.add_argument("--steps", type=int, default=10, help="in a timed call")
    words.add_argument("--candidates", type=int, default=12, help="settings tried of each optimiser, at most")
    return words


def stages(study: Study) -> Iterator[tuple[str, Callable[[], None]]]:
    """The stages by name, in order."""
    yield "read", study.read
    yield "cost of steps", study.steps
    yield "cost of Laplace", study.epochs
    yield "pre-training", study.pretrain
    yield "fine-tuning", study.fine_tune
    yield "Laplace", study.curve
    yield "scores", study.score


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all stages, and write `language_model.json` and `language_model.md` after each."""
    words = options()
    if words.parse_args(arguments).tiny:
        words.set_defaults(**TINY)
    chosen = words.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    torch.set_float32_matmul_precision("high")
    study = Study(chosen)
    for name, stage in stages(study):
        if not chosen.stages or name in chosen.stages.split(","):
            study.run(name, stage)
    print((chosen.results / "language_model.md").read_text())


if __name__ == "__main__":
    main()
