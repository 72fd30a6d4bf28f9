"""Models of transformers with adapters of peft: tiny configurations, every family of methods."""

import math

import pytest
import torch
from methods.test_adapters import METHODS
from torch import nn

import posterity as po
from posterity.methods import MAP, MCDropout
from posterity.numerics import Key
from posterity.optim import Adam

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, to peft


class Logits(nn.Module):
    """The logits of a model, with classes in the second axis."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).logits.movedim(-1, 1)


def bert(dropout=0.0):
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
    )
    settings = peft.LoraConfig(r=2, lora_dropout=dropout, target_modules=["query", "value"], task_type="SEQ_CLS")
    net = Logits(peft.get_peft_model(transformers.BertForSequenceClassification(config), settings))
    ids = torch.arange(72).reshape(12, 6) % 29
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(6) < 5 - ids[:, :1] % 2).long()}
    return net, (inputs, ids[:, 0] % 3), po.likelihoods.Categorical()


def gpt2(dropout=0.0):
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    settings = peft.LoraConfig(
        r=2, lora_dropout=dropout, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    net = Logits(peft.get_peft_model(transformers.GPT2LMHeadModel(config), settings))
    ids = torch.arange(60).square().reshape(12, 5) % 11
    return net, ({"input_ids": ids[:, :-1]}, ids[:, 1:]), po.likelihoods.Categorical(positions=1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", [bert, gpt2])
def test_methods_run_on_models_of_transformers(model, name):
    net, data, likelihood = model()
    joint = po.Joint(net, likelihood, po.priors.Normal(0.5), num_data=12)
    assert all("lora_" in part.name or "classifier" in part.name for part in joint.network.layout)
    q, _ = po.infer(METHODS[name], joint, data)
    probs = q.predict(data[0]).probs
    assert bool(torch.isfinite(probs).all())
    torch.testing.assert_close(probs.sum(1), torch.ones_like(probs[:, 0]))


def test_dropout_of_adapters_gives_draws():
    net, data, likelihood = bert(dropout=0.3)
    joint = po.Joint(net, likelihood, po.priors.Normal(0.5), num_data=12)
    q, _ = po.infer(MCDropout(steps=4), joint, data)
    assert float(q.outputs(data[0], 4, Key(0)).std(0).max()) > 0.0


def test_members_begin_at_the_model(tmp_path):
    net, data, likelihood = gpt2()
    joint = po.Joint(net, likelihood, po.priors.Normal(0.5), num_data=12)
    with torch.no_grad():  # adapters that were trained before begin anew, too
        for name, p in net.named_parameters():
            p.add_(0.1 if "lora_B" in name else 0.0)
    other = po.Joint(net, likelihood, po.priors.Normal(0.5), num_data=12)
    starts = torch.stack([other.fresh(Key(index)) for index in range(2)])
    assert not torch.equal(*starts)
    expected = joint.outputs(joint.initial(), data[0]).expand(2, -1, -1, -1)
    torch.testing.assert_close(other.outputs(starts, data[0]), expected, rtol=1e-4, atol=1e-5)


def test_curvature_of_an_adapted_language_model_is_the_dense_one():
    net, (inputs, targets), likelihood = gpt2()
    net = net.double()
    joint = po.Joint(net, likelihood, po.priors.Normal(0.5), num_data=12)
    theta = joint.initial() + 0.2 * Key(3).normal((joint.size,), torch.float64)

    def outputs(flat):
        return torch.func.functional_call(net.eval(), joint.network.layout.unflatten(flat), (), inputs)

    jacobian = torch.autograd.functional.jacobian(outputs, theta)  # (N, C, T, P)
    jacobian = jacobian.movedim(1, 2).flatten(0, 1)  # a token is a row
    probs = outputs(theta).softmax(1).movedim(1, 2).flatten(0, 1)
    fisher = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    dense = torch.einsum("nka,nkl,nlb->ab", jacobian, fisher, jacobian)
    matrix = po.curvature.GaussNewton().matrix(joint, theta, po.model.Batch(inputs, targets), None)
    torch.testing.assert_close(matrix, dense, rtol=1e-8, atol=1e-8)
    q, _ = po.infer(METHODS["full"], joint, (inputs, targets), start=theta)
    scatter, size = (theta / 0.5).square().sum(), joint.size
    logdet = torch.logdet(dense + torch.eye(size, dtype=torch.float64) / 0.25)
    value = joint.log_likelihood(theta, po.model.Batch(inputs, targets))
    torch.testing.assert_close(q.log_evidence, value - 0.5 * (logdet + 2 * size * math.log(0.5) + scatter))


def test_a_loader_of_mappings_serves_the_model_itself():
    """Fine-tuning in bfloat16 and small passes, and Laplace over the adapters after it."""
    net, (inputs, labels), likelihood = bert()
    rows = [{**{name: value[i] for name, value in inputs.items()}, "labels": labels[i]} for i in range(12)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    joint = po.Joint(net.model, likelihood, po.priors.Normal(0.5), num_data=12)
    fit = MAP(steps=6, batch_size=None, optimizer=Adam(0.01))
    q, trace = po.infer(fit, joint, loader, precision="bf16", micro_batch=2)
    _, exact = po.infer(fit, joint, loader)
    torch.testing.assert_close(trace["loss"], exact["loss"], rtol=0.01, atol=0.0)
    q, _ = po.infer(METHODS["Kronecker"], joint, loader, start=q)
    assert q.predict(loader).probs.shape == (12, 3)
