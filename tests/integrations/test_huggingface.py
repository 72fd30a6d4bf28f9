"""The Trainer of Hugging Face with IVON, against plain loops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.integrations import HuggingFaceIVON
from posterity.likelihoods import Categorical
from posterity.optim import IVON
from posterity.priors import Normal

ROWS, LENGTH = 22, 5
pytestmark = [pytest.mark.cpu]


def problem(net: nn.Module) -> po.Joint:
    return po.Joint(net, Categorical(), Normal(scale=1.0), num_data=ROWS)


def ivon(model: nn.Module, **settings: Any) -> tuple[IVON, Any]:
    """The optimiser and a schedule, as the Trainer takes them."""
    optimizer = IVON(model.parameters(), lr=0.2, ess=ROWS, beta2=0.9, weight_decay=1 / ROWS, **settings)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Collator:
    """Batches of a data set of dictionaries, and a record of them."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.batches.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        return {**self.batches[-1]}


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    ids = torch.randint(1, 20, (ROWS, LENGTH), generator=generator)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[::3, 3:] = 0
    return [{"input_ids": i, "attention_mask": m, "labels": (i[0] > 9).long()} for i, m in zip(ids, mask, strict=True)]


@pytest.fixture
def hugging(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import transformers.trainer

    monkeypatch.setattr(transformers.trainer, "is_datasets_available", lambda: False)  # it takes tests/datasets for it
    return transformers


def model(hugging: Any) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hugging.BertForSequenceClassification(hugging.BertConfig(vocab_size=20, **sizes, **plain))


def arguments(hugging: Any, folder: Path, **settings: Any) -> Any:
    given = {"max_grad_norm": 0.0, "num_train_epochs": 3, **settings}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    quiet.update({"save_strategy": "no", "logging_strategy": "no"})
    return hugging.TrainingArguments(str(folder), per_device_train_batch_size=4, **{**quiet, **given})


def trained(
    hugging: Any, folder: Path, callback: Any, *more: Any, net: Any = None, optimizers: Any = None, **a: Any
) -> Any:
    net = model(hugging) if net is None else net
    collator, resume = Collator(), a.pop("resume", None)
    trainer = hugging.Trainer(
        net,
        arguments(hugging, folder, **a),
        train_dataset=rows(),
        eval_dataset=rows(),
        data_collator=collator,
        optimizers=ivon(net) if optimizers is None else optimizers,
        callbacks=[callback, *more],
    )
    trainer.train(resume_from_checkpoint=resume)
    return net, trainer, collator


@pytest.mark.parametrize("accumulated", [1, 4])
def test_ivon_is_that_of_a_plain_loop(hugging: Any, tmp_path: Path, accumulated: int) -> None:
    callback, evaluated = HuggingFaceIVON(problem), []

    class Evaluated(hugging.TrainerCallback):  # type: ignore[misc]
        def on_prediction_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            evaluated.append((state.global_step, vector(model)))

    settings = {"gradient_accumulation_steps": accumulated, "eval_strategy": "steps", "eval_steps": 1}
    settings["per_device_eval_batch_size"] = ROWS
    net, _, collator = trained(hugging, tmp_path, callback, Evaluated(), **settings)

    plain = model(hugging)
    optimizer, schedule = ivon(plain)
    batches = [batch for batch in collator.batches if len(batch["labels"]) < ROWS]  # the rest was for evaluation
    assert len(batches) == 18
    means = []
    for epoch in range(3):
        for low in range(6 * epoch, 6 * epoch + 6, accumulated):
            group = batches[low : min(low + accumulated, 6 * epoch + 6)]
            count = torch.tensor(sum(len(batch["labels"]) for batch in group))
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                for batch in group:
                    plain(**batch, num_items_in_batch=count).loss.backward()
            optimizer.step()
            schedule.step()
            means.append(vector(plain))
    q, wanted = callback.posterior, optimizer.posterior(problem(plain), plain)
    assert torch.equal(q.mean, wanted.mean)
    assert torch.equal(q.variance, wanted.variance)
    assert torch.equal(q.mean, vector(net))
    assert [step for step, _ in evaluated] == [*range(1, len(means) + 1)]
    assert all(torch.equal(seen, mean) for (_, seen), mean in zip(evaluated, means, strict=True))

    whole = {name: torch.stack([row[name] for row in rows()]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():  # the draws of the posterior are those of the model's own weights
        each = []
        for theta in q.sample(3, po.Key(0)):
            nn.utils.vector_to_parameters(theta, plain.parameters())
            each.append(plain.eval()(**whole).logits.softmax(-1))
    predicted = q.predict(whole, draws=3).probs
    torch.testing.assert_close(predicted, torch.stack(each).mean(0).to(predicted), rtol=1e-5, atol=1e-6)
    q.save(tmp_path / "q")
    assert torch.equal(po.load(tmp_path / "q", plain).predict(whole, draws=3).probs, predicted)


def test_a_resumed_training_is_the_uninterrupted_one(hugging: Any, tmp_path: Path) -> None:
    whole, second = HuggingFaceIVON(problem), HuggingFaceIVON(problem)
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 3}
    trained(hugging, tmp_path, whole, **settings)
    trained(hugging, tmp_path, second, resume=str(tmp_path / "checkpoint-4"), **settings)
    assert torch.equal(second.posterior.mean, whole.posterior.mean)
    assert torch.equal(second.posterior.variance, whole.posterior.variance)


def test_what_would_be_wrong_is_refused(hugging: Any, tmp_path: Path, caplog: Any) -> None:
    callback = HuggingFaceIVON(problem)
    with pytest.raises(ValueError, match=r"HuggingFaceIVON.posterior is made at the end of training. Train first."):
        callback.posterior  # noqa: B018
    adam = torch.optim.Adam(model(hugging).parameters())
    with pytest.raises(TypeError, match=r"must be posterity.optim.IVON. Got Adam. Pass Trainer\("):
        trained(hugging, tmp_path, callback, optimizers=(adam, None))
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with pytest.raises(ValueError, match="load_best_model_at_end would join the means of one step"):
        trained(hugging, tmp_path, callback, **best)
    net = model(hugging)
    with pytest.raises(ValueError, match=r"draws once a step: IVON.mc_samples must be 1"):
        trained(hugging, tmp_path, callback, net=net, optimizers=ivon(net, mc_samples=2))
    with pytest.raises(TypeError, match=r"HuggingFaceIVON.problem must return a Joint. Got 3"):
        trained(hugging, tmp_path, HuggingFaceIVON(lambda net: 3))  # type: ignore[arg-type, return-value]
    trained(hugging, tmp_path, callback, max_grad_norm=1.0, max_steps=1)
    assert "gradients are clipped to 1" in caplog.text


def test_means_return_where_a_step_is_given_up(hugging: Any, tmp_path: Path) -> None:
    class Stop(hugging.TrainerCallback):  # type: ignore[misc]
        def __init__(self, fails: bool) -> None:
            self.fails, self.drawn = fails, torch.empty(0)

        def on_substep_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            self.drawn = vector(model)
            if self.fails:
                raise RuntimeError("full memory")
            control.should_training_stop = True

        def on_prediction_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            self.evaluated = vector(model)

    net = model(hugging)
    means, stop, callback = vector(net), Stop(False), HuggingFaceIVON(problem)
    trained(hugging, tmp_path, callback, stop, net=net, gradient_accumulation_steps=2, eval_strategy="epoch")
    assert torch.equal(stop.evaluated, means)
    assert torch.equal(vector(net), means)
    assert torch.equal(callback.posterior.mean, means)
    assert all(p.grad is None for p in net.parameters())
    assert not torch.equal(stop.drawn, means)
    with pytest.raises(RuntimeError, match="full memory"):
        trained(hugging, tmp_path, callback, Stop(True), net=net, gradient_accumulation_steps=2)
    assert not torch.equal(vector(net), means)
    callback.restore()
    assert torch.equal(vector(net), means)


def vector(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()
