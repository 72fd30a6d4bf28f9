"""What every method must do; a new method is one row of cases.CASES."""

import copy
import dataclasses
import pickle
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from contracts.cases import CASES, COLUMNS, Case, inputs
from killedruns import KillAfter, KilledError
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.errors import BadData
from posterity.inference import Checkpoint, Trace
from posterity.methods.parts import subset
from posterity.model import Tempering
from posterity.numerics import Key
from posterity.posteriors import Posterior
from posterity.posteriors.linearized import Linearized
from posterity.priors import Normal
from posterity.storage import decode, encode

FLOAT64 = torch.float64
MEMBERS = 8

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
member_cases = pytest.mark.parametrize("case", [c for c in CASES if c.members], ids=lambda case: case.name)
full_cases = pytest.mark.parametrize("case", [c for c in CASES if c.every_row], ids=lambda case: case.name)
drawing_cases = pytest.mark.parametrize("case", [c for c in CASES if c.draws], ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def run(case: Case, dtype: torch.dtype = FLOAT64, **options: object) -> tuple[Posterior, Trace]:
    return po.infer(case.method, case.joint(dtype), case.data(dtype), **options)


@cache
def run_once(case: Case, dtype: torch.dtype = FLOAT64) -> tuple[Posterior, Trace]:
    """The run that others are compared with."""
    return run(case, dtype)


def tensors(q: Posterior) -> dict[str, Tensor]:
    """All that a posterior is made of, its joint included."""
    return dict(q.parts()["posterior"].tensors)


def same_bits(first: Posterior, second: Posterior) -> bool:
    one, two = first.parts()["posterior"], second.parts()["posterior"]
    return one.config == two.config and same_tensors(dict(one.tensors), dict(two.tensors))


def same_tensors(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    if one.keys() != two.keys():
        return False
    differ = {
        name: (one[name].cpu(), two[name].cpu()) for name in one if not torch.equal(one[name].cpu(), two[name].cpu())
    }
    for name, pair in differ.items():
        sys.stdout.write(f"{name} differs: {pair}\n")
    return not differ


def assert_close(first: Posterior, second: Posterior, tolerance: float) -> None:
    one, two = tensors(first), tensors(second)
    assert type(first) is type(second)
    for held in (one, two):  # one scale for each weight, or a pattern of them: compared by what it says
        for name in [name for name in held if name.startswith("joint.prior.")]:
            del held[name]
    torch.testing.assert_close(
        first.joint.log_prior(first.point()), second.joint.log_prior(first.point()), rtol=tolerance, atol=tolerance
    )
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], two[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert first.joint.likelihood.num_free == second.joint.likelihood.num_free
    x = inputs(FLOAT64, 5)
    torch.testing.assert_close(first.predict(x).mean, second.predict(x).mean, rtol=tolerance, atol=tolerance)


def assert_says_the_same(first: Posterior, second: Posterior, tolerance: float) -> None:
    """As `assert_close`, of posteriors that may hold one matrix in other forms: a factor of more or fewer rows."""
    assert type(first) is type(second)
    x = inputs(FLOAT64, 5)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(first.point(), second.point(), **close)
    one, two = first.predict(x), second.predict(x)
    torch.testing.assert_close(one.mean, two.mean, **close)
    torch.testing.assert_close(one.variance, two.variance, **close)
    if isinstance(first, Linearized):
        assert isinstance(second, Linearized)
        precisions = first.gaussian.precision, second.gaussian.precision
        torch.testing.assert_close(*[precision.covariance() for precision in precisions], **close)
        torch.testing.assert_close(*[precision.logdet for precision in precisions], **close)
        torch.testing.assert_close(first.log_evidence, second.log_evidence, **close)


@every_case
def test_same_seed_gives_the_same_bits(case: Case) -> None:
    (first, first_trace), (second, second_trace) = run(case, seed=5), run(case, seed=5)
    assert same_bits(first, second)
    assert same_tensors(first_trace.tensors(), second_trace.tensors())


@every_case
def test_the_seed_matters_where_numbers_are_drawn(case: Case) -> None:
    assert same_bits(run(case, seed=5)[0], run(case, seed=6)[0]) != case.draws


@every_case
@pytest.mark.parametrize("kills", [[3], [1, 2, 3]], ids=str)  # the latter begins anew, and resumes at steps 1 and 2
def test_resumed_run_is_the_uninterrupted_one_to_the_bit(case: Case, kills: list[int], tmp_path: Path) -> None:
    whole, whole_trace = run_once(case)
    checkpoint = Checkpoint(tmp_path / "run", steps=1)
    for step in kills:
        with pytest.raises(KilledError):
            run(case, checkpoint=checkpoint, callbacks=[KillAfter(step)])
    resumed, trace = run(case, checkpoint=checkpoint)
    assert same_bits(resumed, whole)
    assert same_tensors(trace.tensors(), whole_trace.tensors())


@every_case
def test_resumed_run_may_begin_some_steps_back(case: Case, tmp_path: Path) -> None:
    whole, whole_trace = run_once(case)
    checkpoint = Checkpoint(tmp_path / "run", steps=2)
    with pytest.raises(KilledError):
        run(case, checkpoint=checkpoint, callbacks=[KillAfter(len(whole_trace.steps(whole_trace.names[0])))])
    resumed, trace = run(case, checkpoint=checkpoint)
    assert same_bits(resumed, whole)
    assert same_tensors(trace.tensors(), whole_trace.tensors())


@every_case
def test_says_whether_it_takes_members(case: Case) -> None:
    assert case.method.traits.takes_members == case.members


@member_cases
@pytest.mark.parametrize("own_start", [True, False], ids=["start of each", "one start"])
def test_members_together_equal_members_one_by_one(case: Case, own_start: bool) -> None:
    plain = case.joint(FLOAT64)
    joint = dataclasses.replace(
        plain,
        prior=Normal(plain.prior.scale * torch.linspace(0.5, 1.5, MEMBERS, dtype=FLOAT64)),
        tempering=Tempering(torch.linspace(0.5, 2.0, MEMBERS), torch.linspace(1.5, 0.8, MEMBERS, dtype=FLOAT64)),
    )
    start = plain.initial()
    if own_start:
        start = start + 0.1 * Key(7).normal((MEMBERS, start.shape[0]), FLOAT64)
    together, trace = po.infer(case.method, joint, case.data(FLOAT64), start=start)
    assert together.num_members == MEMBERS
    for index in (0, 3, MEMBERS - 1):
        alone, alone_trace = po.infer(
            case.method, joint.member(index), case.data(FLOAT64), start=start[index] if own_start else start
        )
        assert_close(together.member(index), alone, 1e-10)
        for name in trace.names:
            torch.testing.assert_close(trace[name][:, index], alone_trace[name], rtol=1e-10, atol=1e-10)


@member_cases
def test_members_with_data_of_their_own_equal_members_one_by_one(case: Case) -> None:
    x, y = case.data(FLOAT64)
    x = x + 0.3 * Key(8).normal((3, *x.shape), FLOAT64)
    y = torch.stack([y.roll(shift, 0) for shift in range(3)])
    together, trace = po.infer(case.method, case.joint(FLOAT64), po.as_data((x, y), per_member=True))
    for index in range(3):
        alone, alone_trace = po.infer(case.method, case.joint(FLOAT64), (x[index], y[index]))
        assert_close(together.member(index), alone, 1e-10)
        for name in trace.names:
            torch.testing.assert_close(trace[name][:, index], alone_trace[name], rtol=1e-10, atol=1e-10)


@member_cases
def test_resumed_members_are_the_uninterrupted_ones(case: Case, tmp_path: Path) -> None:
    start = case.joint(FLOAT64).initial() + 0.1 * Key(7).normal((3, case.joint(FLOAT64).size), FLOAT64)
    whole, whole_trace = run(case, start=start)
    with pytest.raises(KilledError):
        run(case, start=start, checkpoint=Checkpoint(tmp_path, steps=1), callbacks=[KillAfter(3)])
    resumed, trace = run(case, start=start, checkpoint=Checkpoint(tmp_path, steps=1))
    assert same_bits(resumed, whole)
    assert same_tensors(trace.tensors(), whole_trace.tensors())


@every_case
@every_dtype
def test_runs_in_the_dtype_of_the_model(case: Case, dtype: torch.dtype) -> None:
    q, trace = run_once(case, dtype)
    assert q.point().dtype == dtype
    assert all(bool(torch.isfinite(trace[name]).all()) for name in trace)
    assert bool(torch.isfinite(q.predict(inputs(dtype, 5)).mean).all())


@every_case
def test_float32_and_float64_agree(case: Case) -> None:
    low, high = (run_once(case, dtype)[0].point().double() for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(low, high, rtol=1e-3, atol=1e-4)


@every_case
def test_leaves_all_that_it_is_given_untouched(case: Case) -> None:
    module = case.joint(FLOAT64).network._module.train()
    joint = dataclasses.replace(case.joint(FLOAT64), network=po.model.Network(module))
    x, y = case.data(FLOAT64)
    start = joint.initial()
    before = copy.deepcopy([module.state_dict(), x, y, start, joint.initial()])
    generator = torch.get_rng_state()
    po.infer(case.method, joint, (x, y), start=start)
    after = [module.state_dict(), x, y, start, joint.initial()]
    assert same_tensors(after[0], before[0])
    assert all(torch.equal(one, two) for one, two in zip(after[1:], before[1:], strict=True))
    assert module.training
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


@every_case
def test_is_a_value(case: Case) -> None:
    twin = dataclasses.replace(case.method)
    assert twin == case.method
    assert hash(twin) == hash(case.method)
    assert pickle.loads(pickle.dumps(case.method)) == case.method
    names = {}
    for package in (po.priors, po.optim, po.curvature, po.evidence, po.kernels, po.methods, subset):
        names.update(vars(package))
    assert eval(repr(case.method), names) == case.method
    stored: dict[str, Tensor] = {}
    assert decode(encode(case.method, stored), stored) == case.method
    assert not stored
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.method.batch_size = 3  # type: ignore[attr-defined]


@every_case
@every_dtype
def test_loaded_posterior_predicts_the_same_bits(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    q, _ = run_once(case, dtype)
    q.save(tmp_path / "run")
    untrained = copy.deepcopy(case.joint(dtype).network._module)
    with torch.no_grad():
        for parameter in untrained.parameters():
            parameter.zero_()
    loaded = po.load(tmp_path / "run", untrained)
    assert same_bits(loaded, q)
    x = inputs(dtype, 5)
    first, second = q.predict(x), loaded.predict(x)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.variance, second.variance)
    assert torch.equal(q.sample(3, Key(0)), loaded.sample(3, Key(0)))


@member_cases
def test_members_survive_storage(case: Case, tmp_path: Path) -> None:
    start = case.joint(FLOAT64).initial().expand(3, -1)
    q, _ = run(case, start=start)
    q.save(tmp_path / "run")
    loaded = po.load(tmp_path / "run", case.joint(FLOAT64).network._module)
    assert same_bits(loaded, q)
    assert same_bits(loaded.member(2), q.member(2))


@full_cases
def test_a_loader_gives_what_its_tensors_give(case: Case) -> None:
    rows = case.data(FLOAT64)
    size = getattr(case.method, "batch_size", None) or len(rows[0])
    loader = DataLoader(TensorDataset(*rows), batch_size=size)
    from_loader, trace = po.infer(case.method, case.joint(FLOAT64), loader)
    from_tensors, tensor_trace = run_once(case)
    assert same_bits(from_loader, from_tensors)
    assert same_tensors(trace.tensors(), tensor_trace.tensors())


@pytest.mark.cpu  # torch's sampler draws by a generator of the CPU
@drawing_cases
def test_a_shuffling_loader_is_keyed_by_the_seed_and_resumes(case: Case, tmp_path: Path) -> None:
    def fit(seed: int, **options: object) -> Posterior:
        loader = DataLoader(TensorDataset(*case.data(FLOAT64)), batch_size=6, shuffle=True)
        return po.infer(case.method, case.joint(FLOAT64), loader, seed=seed, **options)[0]

    whole = fit(1)
    assert same_bits(fit(1), whole)
    assert not same_bits(fit(2), whole)
    _, trace = run_once(case)
    steps = len(trace.steps(trace.names[0]))
    with pytest.raises(KilledError):
        fit(1, checkpoint=Checkpoint(tmp_path, steps=1), callbacks=[KillAfter(min(6, steps - 1))])
    assert same_bits(fit(1, checkpoint=Checkpoint(tmp_path, steps=1)), whole)


@full_cases
def test_a_weight_of_two_is_a_row_twice(case: Case) -> None:
    x, y = case.data(FLOAT64)
    weights = torch.ones(len(x), dtype=FLOAT64)
    weights[[2, 11]] = 2.0
    weighted, _ = po.infer(case.method, case.joint(FLOAT64), (x, y, weights))
    twice = torch.cat([torch.arange(len(x)), torch.tensor([2, 11])])
    joint = dataclasses.replace(case.joint(FLOAT64), num_data=len(twice))
    repeated, _ = po.infer(case.method, joint, (x[twice], y[twice]))
    assert_says_the_same(weighted, repeated, 1e-7)  # Adam's epsilon is not scaled with the number of rows
    plain, _ = run_once(case)
    with pytest.raises(AssertionError):
        assert_says_the_same(weighted, plain, 1e-7)


@full_cases
def test_a_weight_of_zero_is_no_row(case: Case) -> None:
    x, y = case.data(FLOAT64)
    weights = torch.ones(len(x), dtype=FLOAT64)
    weights[[0, 7]] = 0.0
    weighted, _ = po.infer(case.method, case.joint(FLOAT64), (x, y, weights))
    joint = dataclasses.replace(case.joint(FLOAT64), num_data=len(x) - 2)
    fewer, _ = po.infer(case.method, joint, (x[weights > 0], y[weights > 0]))
    assert_says_the_same(weighted, fewer, 1e-7)


@every_case
def test_rows_must_fit_the_model(case: Case) -> None:
    x, y = case.data(FLOAT64)
    with pytest.raises(BadData, match=f"inputs \\({len(x)}, {COLUMNS - 1}\\)"):
        po.infer(case.method, case.joint(FLOAT64), (x[:, 1:], y))


@pytest.mark.cuda
@pytest.mark.cpu  # it has tensors on both
@every_case
@every_dtype
def test_does_the_same_on_a_gpu(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = case.joint(dtype)
    module = copy.deepcopy(plain.network._module).cuda()
    joint = dataclasses.replace(plain, network=po.model.Network(module))
    x, y = case.data(dtype)  # on the CPU: `infer` moves them
    q, trace = po.infer(case.method, joint, (x, y))
    assert q.point().device.type == "cuda"
    here, _ = run_once(case, dtype)
    tolerance = 1e-9 if dtype == FLOAT64 else 1e-3
    if not case.noise_of_device:
        torch.testing.assert_close(q.point().cpu(), here.point(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(q.predict(x).mean.cpu(), here.predict(x).mean, rtol=tolerance, atol=tolerance)
    assert same_bits(po.infer(case.method, joint, (x.cuda(), y.cuda()))[0], q)
    with pytest.raises(KilledError):
        po.infer(case.method, joint, (x, y), checkpoint=Checkpoint(tmp_path / "run", steps=1), callbacks=[KillAfter(3)])
    resumed, resumed_trace = po.infer(case.method, joint, (x, y), checkpoint=tmp_path / "run")
    assert same_bits(resumed, q)
    assert same_tensors(trace.tensors(), resumed_trace.tensors())
    q.save(tmp_path / "saved")
    assert torch.equal(po.load(tmp_path / "saved", module).predict(x).mean, q.predict(x).mean)
    on_cpu = po.load(tmp_path / "saved", plain.network._module)
    if not case.noise_of_device:
        torch.testing.assert_close(on_cpu.predict(x).mean, here.predict(x).mean, rtol=tolerance, atol=tolerance)
    assert on_cpu.point().device.type == "cpu"
    if case.members:
        members, _ = po.infer(case.method, joint, (x, y), start=q.point().expand(3, -1))
        assert members.num_members == 3
