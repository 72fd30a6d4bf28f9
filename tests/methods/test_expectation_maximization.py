"""EM by a driver: what it records, when it ends, and what it refuses."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import posterity as po
from posterity.errors import BoundFell, Diverged
from posterity.evidence import jensen
from posterity.methods import CoordinateAscent, ExpectationMaximization
from posterity.numerics import Key

Values = dict[str, Tensor]
POINTS = torch.tensor([4.3, 6.0, 7.2, 3.8, 4.9, 6.6, 4.1, 7.9, 5.2, 3.5, 6.9, 7.4], dtype=torch.float64)
SHAPES = {"weights": (2,), "means": (2,), "variances": (2,)}


def log_joint(values: Values) -> Tensor:
    """log p(y_n, z) of a mixture of two normal densities, (N, 2), or (R, N, 2) with restarts."""
    weights, means, variances = (values[name].unsqueeze(-2) for name in SHAPES)
    points = POINTS.to(weights.device).unsqueeze(-1)
    squares = (points - means).square() / variances
    return weights.log() - 0.5 * (squares + variances.log() + math.log(2.0 * math.pi))


def expectation(values: Values, latent: Values) -> Values:
    return {"q": jensen.posterior(log_joint(values))}


def maximisation(values: Values, latent: Values) -> Values:
    q, points = latent["q"], POINTS.to(latent["q"].device).unsqueeze(-1)
    counts = q.sum(-2)
    means = (q * points).sum(-2) / counts
    variances = (q * (points - means.unsqueeze(-2)).square()).sum(-2) / counts
    return {"weights": counts / len(POINTS), "means": means, "variances": variances}


def bound(values: Values, latent: Values) -> Tensor:
    return jensen.jensen_bound(log_joint(values), latent["q"]).sum(-1)


def density() -> po.Density:
    def log_likelihood(**values: Tensor) -> Tensor:
        return jensen.log_likelihood(log_joint(values)).sum(-1)

    return po.Density(log_likelihood, SHAPES, dtype=torch.float64)


def em(**settings: object) -> ExpectationMaximization:
    return ExpectationMaximization(expectation, maximisation, bound, **settings)  # type: ignore[arg-type]


def start(*means: float) -> Tensor:
    return torch.tensor([0.5, 0.5, *means, 1.0, 1.0], dtype=torch.float64)


def test_the_bound_touches_the_log_likelihood_after_each_e_step_and_never_falls() -> None:
    problem = density()
    q, trace = po.infer(em(), problem, None, start=start(6.5, 4.5))
    both = torch.stack([trace["bound"][:, 0], trace["bound_after_m"][:, 0]], 1).flatten()
    assert bool((both.diff() >= -1e-10 * both[1:].abs()).all())
    assert float(trace["bound"][0, 0]) == pytest.approx(float(problem.log_density(start(6.5, 4.5))), rel=1e-12)
    assert float(problem.log_density(q.point())) == pytest.approx(-19.041734643520883, rel=1e-7)


def test_the_run_ends_when_the_bound_stands_still() -> None:
    _, trace = po.infer(em(rounds=500, tolerance=1e-6), density(), None, start=start(6.5, 4.5))
    changes = trace["bound"][:, 0].diff().abs() / trace["bound"][1:, 0].abs()
    assert 3 < len(changes) < 499
    assert bool((changes[:-1] > 1e-6).all())
    assert float(changes[-1]) <= 1e-6


def test_an_absolute_tolerance_is_in_nats() -> None:
    _, trace = po.infer(em(rounds=500, tolerance=0.0, absolute=0.01), density(), None, start=start(6.5, 4.5))
    changes = trace["bound"][:, 0].diff().abs()
    assert float(changes[-1]) <= 0.01 < float(changes[-2])


@pytest.mark.parametrize("batched", [False, True])
def test_restarts_go_as_they_would_alone_and_the_best_is_kept(batched: bool) -> None:
    starts = torch.stack([start(6.5, 4.5), start(5.0, 5.0), start(8.0, 3.0)])
    q, trace = po.infer(em(batched=batched), density(), None, start=starts)
    alone = [po.infer(em(), density(), None, start=row)[1]["bound_after_m"][-1, 0] for row in starts]
    torch.testing.assert_close(trace["bound_after_m"][-1], torch.stack(alone), rtol=1e-12, atol=1e-12)
    assert float(density().log_density(q.point())) >= max(map(float, alone)) - 1e-9


def test_restarts_begin_at_values_by_their_keys() -> None:
    def initial(key: Key) -> Values:
        means = 4.0 + 4.0 * key.uniform((2,), torch.float64)
        half = torch.full((2,), 0.5, dtype=torch.float64)
        return {"weights": half, "means": means, "variances": 2.0 * half}

    _, trace = po.infer(em(restarts=4, initial_values=initial, batched=True), density(), None)
    _, again = po.infer(em(restarts=4, initial_values=initial, batched=True), density(), None)
    assert trace["bound"].shape[1] == 4
    assert trace["bound"][0].unique().numel() == 4
    assert torch.equal(trace["bound"], again["bound"])


def test_a_restart_that_fails_is_given_up_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    starts = torch.stack([start(6.5, 4.5), torch.tensor([0.5, 0.5, 7.0, 4.0, -1.0, 1.0], dtype=torch.float64)])
    q, trace = po.infer(em(batched=True), density(), None, start=starts)
    assert "of 2 restarts" in caplog.text
    assert "left out: 1 (counted from 0)" in caplog.text
    for column in ("bound", "bound_after_m"):
        assert bool((trace[column][:, 1] == -math.inf).all())
    assert int(trace["bound_after_m"][-1].argmax()) == 0
    assert float(density().log_density(q.point())) == pytest.approx(-19.041734643520883, rel=1e-7)
    with pytest.raises(Diverged, match="step 1"):
        po.infer(em(batched=True), density(), None, start=starts[1])


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("factors", [(0.0, 1.0), (2.0, 2.0)], ids=["edge", "outside"])
def test_a_restart_outside_the_constraints_is_given_up_for_the_others(factors, batched: bool) -> None:
    """An M-step off the simplex would otherwise end in theta as other values than those whose bound was found."""

    def off(values: Values, latent: Values) -> Values:
        found = maximisation(values, latent)
        far = (values["means"] > 50.0).any(-1, keepdim=True)
        by = torch.tensor(factors, dtype=torch.float64, device=far.device)
        return {**found, "weights": torch.where(far, by * found["weights"], found["weights"])}

    problem = dataclasses.replace(
        density(), constraints={"weights": po.model.Simplex(), "variances": po.model.Positive()}
    )
    values = [dict(zip(SHAPES, start(*means).reshape(3, 2), strict=True)) for means in ((6.5, 4.5), (60.0, 4.5))]
    starts = torch.stack([problem.unconstrained(each) for each in values])
    method = ExpectationMaximization(expectation, off, bound, exact=False, batched=batched)
    q, _ = po.infer(method, problem, None, start=starts)
    alone, _ = po.infer(method, problem, None, start=starts[0])
    torch.testing.assert_close(q.point(), alone.point())
    with pytest.raises(Diverged, match="step 1 the bound or the values are not finite, or lie on the edge"):
        po.infer(method, problem, None, start=starts[1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"expectation": lambda values, latent: torch.zeros(2)}, r"expectation must give a dict of tensors. Got tens"),
        (
            {"maximisation": lambda values, latent: {**values, "means": 0.5}},
            r"maximisation must give a dict of tensors",
        ),
        ({"maximisation": lambda values, latent: {k: v.float() for k, v in values.items()}}, r"as torch.float64.*Got"),
        ({"bound": lambda values, latent: 1.0}, r"bound must be a tensor of real numbers. Got 1.0"),
        ({"initial_values": {"means": 1.0}}, r"initial_values must be a function of a Key"),
    ],
)
def test_functions_that_give_something_else_are_refused(wrong: dict[str, object], message: str) -> None:
    functions = {"expectation": expectation, "maximisation": maximisation, "bound": bound, **wrong}
    with pytest.raises(TypeError, match=message):
        po.infer(ExpectationMaximization(**functions), density(), None, start=start(6.5, 4.5))  # type: ignore[arg-type]


def test_batched_functions_must_give_an_axis_of_restarts() -> None:
    def without(values: Values, latent: Values) -> Values:
        return {"q": expectation(values, latent)["q"][0]}

    method = ExpectationMaximization(without, maximisation, bound, batched=True)
    with pytest.raises(ValueError, match=r"'q' with a leading axis of 1 restarts.*Got shape \(12, 2\)"):
        po.infer(method, density(), None, start=start(6.5, 4.5))


def test_initial_values_take_the_number_type_of_the_density() -> None:
    method = em(initial_values=lambda key: dict(zip(SHAPES, start(6.5, 4.5).float().reshape(3, 2), strict=True)))
    q, _ = po.infer(method, density(), None)
    assert q.point().dtype == torch.float64


def test_a_parameter_may_be_a_single_number() -> None:
    """Noise of unknown variance around zero, where nothing is hidden: one M-step is the answer."""
    problem = po.Density(lambda variance: -0.5 * (variance.log() + 4.0 / variance), {"variance": ()})
    method = ExpectationMaximization(
        lambda values, latent: {"square": torch.tensor(4.0)},
        lambda values, latent: {"variance": latent["square"]},
        lambda values, latent: -0.5 * (values["variance"].log() + latent["square"] / values["variance"]),
    )
    q, _ = po.infer(method, problem, None, start=torch.tensor([1.0]))
    assert float(q.point()) == 4.0


@pytest.mark.parametrize("step", ["E", "M"])
def test_an_exact_step_that_lowers_the_bound_is_an_error_that_names_it(step: str) -> None:
    def bad_maximisation(values: Values, latent: Values) -> Values:
        found = maximisation(values, latent)
        return {**found, "variances": 9.0 * found["variances"]}

    def bad_expectation(values: Values, latent: Values) -> Values:
        return {"q": expectation(values, latent)["q"].flip(-1)} if latent else expectation(values, latent)

    wrong = {"expectation": bad_expectation} if step == "E" else {"maximisation": bad_maximisation}
    functions = {"expectation": expectation, "maximisation": maximisation, "bound": bound, **wrong}
    number = {"E": 2, "M": 1}[step]
    with pytest.raises(BoundFell, match=rf"{step}-step of round {number} .*exact=False"):
        po.infer(ExpectationMaximization(**functions), density(), None, start=start(6.5, 4.5))
    inexact = ExpectationMaximization(**functions, exact=False, rounds=3)
    assert len(po.infer(inexact, density(), None, start=start(6.5, 4.5))[1]["bound"]) == 3


def test_a_run_that_is_taken_up_again_is_the_uninterrupted_one(tmp_path) -> None:
    class Stop(po.inference.Callback):
        def after_step(self, run: po.inference.Run) -> None:
            if run.step == 5:
                raise KeyboardInterrupt

    place = po.inference.Checkpoint(tmp_path / "run", steps=1)
    whole, trace = po.infer(em(), density(), None, start=start(6.5, 4.5))
    with pytest.raises(KeyboardInterrupt):
        po.infer(em(), density(), None, start=start(6.5, 4.5), checkpoint=place, callbacks=[Stop()])
    again, resumed = po.infer(em(), density(), None, start=start(6.5, 4.5), checkpoint=place)
    assert torch.equal(whole.point(), again.point())
    assert torch.equal(trace["bound"], resumed["bound"])


def test_an_m_step_must_give_all_values_in_their_shapes() -> None:
    def fewer(values: Values, latent: Values) -> Values:
        return {"weights": values["weights"]}

    def wider(values: Values, latent: Values) -> Values:
        return {**values, "means": torch.zeros(3)}

    with pytest.raises(ValueError, match=r"'means' of shape \(2,\).*Got weights"):
        po.infer(ExpectationMaximization(expectation, fewer, bound), density(), None, start=start(6.5, 4.5))
    with pytest.raises(ValueError, match=r"'means' of shape \(2,\).*Got shape \(3,\)"):
        po.infer(ExpectationMaximization(expectation, wider, bound), density(), None, start=start(6.5, 4.5))


def test_a_bound_must_be_summed_over_the_data() -> None:
    def each(values: Values, latent: Values) -> Tensor:
        return jensen.jensen_bound(log_joint(values), latent["q"])

    with pytest.raises(ValueError, match=r"summed over the data. Got shape \(12,\)"):
        po.infer(ExpectationMaximization(expectation, maximisation, each), density(), None, start=start(6.5, 4.5))


def test_a_joint_is_sent_to_variational_em() -> None:
    joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=2)
    with pytest.raises(TypeError, match="VariationalEM"):
        po.infer(em(), joint, (torch.zeros(2, 1), torch.zeros(2, 1)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "rounds"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"restarts": 1.5}, "restarts"),
        ({"absolute": math.nan}, "absolute"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        em(**settings)


def test_functions_must_be_functions() -> None:
    with pytest.raises(TypeError, match="maximisation must be a function"):
        ExpectationMaximization(expectation, None, bound)  # type: ignore[arg-type]


def two_hidden(values: Values) -> Tensor:
    """log p(y_n, a, b): y_n normal around the sum of two switched levels, (N, 2, 2)."""
    levels = values["levels"]
    switch = torch.tensor([0.0, 1.0], dtype=torch.float64)
    mean = levels[0] * switch[:, None] + levels[1] * switch
    prior = torch.tensor([[0.4, 0.2], [0.3, 0.1]], dtype=torch.float64).log()
    return prior - 0.5 * (POINTS[:, None, None] - 3.0 - mean).square() - 0.5 * math.log(2.0 * math.pi)


def levels_after(table: Tensor) -> Tensor:
    """The least squares for the levels, from q (N, 2, 2)."""
    a, b, both = table[:, 1].sum((0, 1)), table[:, :, 1].sum((0, 1)), table[:, 1, 1].sum(0)
    shifted = POINTS - 3.0
    right = torch.stack([(table[:, 1].sum(-1) * shifted).sum(), (table[:, :, 1].sum(-1) * shifted).sum()])
    return torch.linalg.solve(torch.stack([torch.stack([a, both]), torch.stack([both, b])]), right)


def test_coordinate_ascent_with_one_factor_for_all_is_em() -> None:
    values = {"levels": torch.tensor([1.0, 2.5], dtype=torch.float64)}
    exact = jensen.posterior(two_hidden(values), 2)
    steps = CoordinateAscent.discrete(two_hidden, {"q": (0, 1)})
    torch.testing.assert_close(steps(values, {})["q"], exact, rtol=1e-12, atol=1e-14)
    turned = CoordinateAscent.discrete(two_hidden, {"q": (1, 0)})
    torch.testing.assert_close(turned(values, {})["q"], exact.transpose(1, 2), rtol=1e-12, atol=1e-14)

    problem = po.Density(
        lambda levels: jensen.log_likelihood(two_hidden({"levels": levels}), 2).sum(),
        {"levels": (2,)},
        dtype=torch.float64,
    )
    by_ascent = ExpectationMaximization(
        steps, lambda values, latent: {"levels": levels_after(latent["q"])}, steps.bound, rounds=7, tolerance=0.0
    )
    by_formula = ExpectationMaximization(
        lambda values, latent: {"q": jensen.posterior(two_hidden(values), 2)},
        lambda values, latent: {"levels": levels_after(latent["q"])},
        lambda values, latent: jensen.jensen_bound(two_hidden(values), latent["q"], 2).sum(),
        rounds=7,
        tolerance=0.0,
    )
    begin = values["levels"]
    one, first = po.infer(by_ascent, problem, None, start=begin)
    two, second = po.infer(by_formula, problem, None, start=begin)
    torch.testing.assert_close(one.point(), two.point(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(first["bound"], second["bound"], rtol=1e-12, atol=1e-12)


def test_factors_are_best_for_each_other_and_bound_from_below() -> None:
    values = {"levels": torch.tensor([1.0, 2.5], dtype=torch.float64)}
    steps = CoordinateAscent.discrete(two_hidden, {"a": (0,), "b": (1,)}, tolerance=1e-15)
    found = steps(values, {})
    table = two_hidden(values)
    best = jensen.posterior((table * found["b"][:, None, :]).sum(2))
    torch.testing.assert_close(found["a"], best, rtol=1e-6, atol=1e-8)
    whole = found["a"][:, :, None] * found["b"][:, None, :]
    bounds, truth = jensen.jensen_bound(table, whole, 2), jensen.log_likelihood(table, 2)
    assert bool((bounds <= truth + 1e-12).all())
    assert float((truth - bounds).max()) > 1e-3  # the two are not independent given y
    torch.testing.assert_close(steps.bound(values, found), bounds.sum(), rtol=1e-12, atol=1e-12)


def test_variational_em_with_factors_raises_its_bound() -> None:
    steps = CoordinateAscent.discrete(two_hidden, {"a": (0,), "b": (1,)})

    def least_squares(values: Values, latent: Values) -> Values:
        return {"levels": levels_after(latent["a"][:, :, None] * latent["b"][:, None, :])}

    problem = po.Density(
        lambda levels: jensen.log_likelihood(two_hidden({"levels": levels}), 2).sum(),
        {"levels": (2,)},
        dtype=torch.float64,
    )
    method = ExpectationMaximization(steps, least_squares, steps.bound, rounds=50)
    q, trace = po.infer(method, problem, None, start=torch.tensor([1.0, 2.5], dtype=torch.float64))
    bounds = trace["bound"][:, 0]
    assert bool((bounds.diff() >= -1e-10).all())
    assert float(bounds[-1] - bounds[0]) > 0.1
    assert float(bounds[-1]) <= float(problem.log_density(q.point())) + 1e-9


def test_an_update_that_lowers_the_bound_is_named() -> None:
    good = CoordinateAscent.discrete(two_hidden, {"a": (0,), "b": (1,)})
    updates = {**good.updates, "b": lambda values, latent: good.updates["b"](values, latent).flip(-1)}
    wrong = CoordinateAscent(updates, good.bound, good.start)
    with pytest.raises(BoundFell, match="factor 'b' in sweep 1"):
        wrong({"levels": torch.tensor([1.0, 2.5], dtype=torch.float64)}, {})


def test_factors_that_leave_nothing_possible_are_no_numbers_at_once() -> None:
    sweeps = []

    def table(values: Values) -> Tensor:
        sweeps.append(1)
        return torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]).log()  # uniform factors give each value a log p of -inf

    found = CoordinateAscent.discrete(table, {"first": (0,), "second": (1,)})({}, {})
    assert bool(found["first"].isnan().all())
    assert len(sweeps) < 10


@pytest.mark.parametrize("factors", [{"a": (0,), "b": (0,)}, {"a": 0, "b": 1}, {"a": (0, 1), "b": ()}, {}])
def test_factors_must_have_each_hidden_variable_once(factors) -> None:
    with pytest.raises(ValueError, match="tuples with each hidden variable once"):
        CoordinateAscent.discrete(two_hidden, factors)


def test_what_ascends_must_fit_the_factors() -> None:
    with pytest.raises(ValueError, match=r"K1, ..., K1.*Got shape \(12, 2, 2\)"):
        CoordinateAscent.discrete(two_hidden, {"a": (0,)})({"levels": torch.ones(2, dtype=torch.float64)}, {})
    with pytest.raises(TypeError, match="one function for each factor"):
        CoordinateAscent({}, bound, expectation)  # type: ignore[arg-type]
