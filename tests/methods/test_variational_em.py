"""What variational EM does with its methods, M-steps and hyper-parameters, beyond what every method must."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from contracts.cases import classification, labels, linear_regression, network, numbers, regression, tunable_regression
from torch import Tensor, nn

import posterity as po
from posterity.errors import BadData, BadFolder, BoundFell
from posterity.evidence import Evidence, Gamma, MacKayUpdate, NoiseScale, PerLayer, PerTensor, PriorScale, Shared
from posterity.evidence.m_steps import Expected, Maximisation
from posterity.inference import plan
from posterity.likelihoods import Gaussian, StudentT
from posterity.methods import (
    HMC,
    MAP,
    SGLD,
    SWAG,
    Conjugate,
    FullRank,
    Laplace,
    LargestVariance,
    LastLayer,
    LowRankGaussian,
    MeanField,
    NaturalGradient,
    OnlineLaplace,
    VariationalEM,
)
from posterity.methods.parts.rounds import refuse_fall
from posterity.model import Tempering
from posterity.optim import Adam, Cosine, Cycles
from posterity.posteriors import Posterior
from posterity.priors import GroupLasso, Horseshoe, Layerwise, Normal

FLOAT64 = torch.float64
BOTH = (PriorScale(Shared()), NoiseScale())


def doubled(joint: po.Joint, posterior: Posterior) -> po.Joint:
    """No M-step, but one can see that it was there."""
    return dataclasses.replace(joint, prior=Normal(2.0 * joint.prior.scale))


def waves(rows: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    x = 4 * torch.rand(rows, 1, generator=generator, dtype=FLOAT64, device="cpu") - 2
    y = torch.sin(2 * x) + 0.15 * torch.randn(rows, 1, generator=generator, dtype=FLOAT64, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


def run(
    method: VariationalEM, joint: po.Joint, data: object, **options: object
) -> tuple[Posterior, po.inference.Trace]:
    return po.infer(method, joint, data, **options)


def test_laplace_rounds_come_to_what_marginal_likelihood_training_finds():
    fit = MAP(500, None, Adam(0.03), Cosine())
    joint = po.Joint(network([1, 6, 1], FLOAT64), Gaussian(0.5), Normal(1.0), num_data=40)
    laplace = Laplace(tuning=None)
    online, _ = po.infer(OnlineLaplace(fit, laplace, Evidence(PerLayer())), joint, waves())
    wanted = online.joint.bound_prior.variance(joint.initial()).sqrt()
    for steps, rounds, tolerance in (((PriorScale(), NoiseScale()), 25, 0.15), ((MacKayUpdate(PerLayer()),), 20, 0.05)):
        q, trace = run(VariationalEM(laplace, steps, rounds, fit=fit), joint, waves())
        assert trace["bound"][-1] > trace["bound"][0] + 20
        torch.testing.assert_close(trace["bound"][-1], q.log_evidence.cpu())
        assert q.joint.likelihood.scale == pytest.approx(online.joint.likelihood.scale, rel=0.02)
        found = q.joint.bound_prior.variance(joint.initial()).sqrt()
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0.0)


FACTORISED = [MeanField(30, 6), NaturalGradient(30, 6), MAP(30, 6), SGLD(12, 5, 2, 1e-3, 6, thin=2)]
OTHERS = [
    FullRank(30, 6),
    LowRankGaussian(2, 30, 6),
    HMC(12, 5, 2, steps=3),
    SGLD(12, 5, 2, 1e-3, 6, thin=1, schedule=Cycles(length=7, explore=0.5)),
]


@pytest.mark.parametrize(
    ("method", "prior"),
    [
        *((method, GroupLasso(2.0)) for method in FACTORISED),
        *((method, po.priors.Laplace(0.7)) for method in (*FACTORISED, *OTHERS)),
        (MeanField(30, 6), Layerwise({"0.*": Normal(0.5), "*": po.priors.Laplace(1.0)})),
    ],
    ids=lambda value: type(value).__name__,
)
def test_methods_serve_priors_that_are_not_normal(method, prior):
    """Scales move, and the trace has a row for each round."""
    joint = dataclasses.replace(classification(FLOAT64), prior=prior)
    q, trace = run(VariationalEM(method, PriorScale(), rounds=3, draws=4), joint, labels(FLOAT64))
    gaussian = isinstance(method, (MeanField, FullRank, LowRankGaussian, NaturalGradient))
    assert ("bound_standard_error" in trace) == gaussian
    assert trace["bound" if gaussian else "expected_log_joint"].shape == (4,)
    assert trace["expected_log_likelihood"].shape == (4,)
    assert trace["prior_scale"].shape == (4, 4)
    fitted, given = (of.bound_prior.variance(joint.network.initial).sqrt() for of in (q.joint, joint))
    torch.testing.assert_close(fitted[0].cpu(), trace["prior_scale"][-1, 0])
    assert not torch.allclose(fitted, given)


def test_a_plain_function_is_an_m_step():
    method = VariationalEM(MeanField(20, 6), doubled, rounds=3)
    assert "test_variational_em.doubled" in repr(method)
    assert "0x" not in repr(method)  # a run is known by it
    q, trace = run(method, linear_regression(FLOAT64), numbers(FLOAT64))
    assert q.joint.prior.scale == pytest.approx(0.7 * 2**3)
    assert trace["prior_scale"][:, 0].tolist() == pytest.approx([1.4, 2.8, 5.6, 5.6])


@dataclasses.dataclass(frozen=True)
class Times:
    """A function with a setting."""

    factor: float

    def __call__(self, joint: po.Joint, posterior: Posterior) -> po.Joint:
        return dataclasses.replace(joint, prior=Normal(self.factor * joint.prior.scale))


def test_a_stored_run_is_known_by_the_settings_of_its_functions(tmp_path: Path):
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    run(VariationalEM(MAP(3), Times(0.5), rounds=2), joint, data, checkpoint=tmp_path / "run")
    with pytest.raises(BadFolder):
        run(VariationalEM(MAP(3), Times(0.9), rounds=2), joint, data, checkpoint=tmp_path / "run")
    assert "0x" not in repr(VariationalEM(MAP(3), doubled))


def test_an_exact_step_that_lowers_the_bound_is_named():
    with pytest.raises(BoundFell, match=r"M-step .*doubled of round 1 lowered the bound from -[\d.]+ to -"):
        run(VariationalEM(Conjugate(), (PriorScale(), doubled)), linear_regression(FLOAT64), numbers(FLOAT64))
    joint = linear_regression(FLOAT64)
    with pytest.raises(BoundFell, match="E-step of round 3"):
        refuse_fall(joint, "E-step", 3, torch.tensor(-1.0), torch.tensor(-1.1))
    low = linear_regression(torch.float32)  # whose rounding is no fall
    refuse_fall(low, "E-step", 3, torch.tensor(-1.0, dtype=FLOAT64), torch.tensor(-1.0 - 1e-6, dtype=FLOAT64))


@dataclasses.dataclass(frozen=True)
class Wandering(Maximisation):
    """An M-step that does not say it climbs."""

    needs_residuals = False
    climbs = False

    def __call__(self, joint: po.Joint, posterior: Posterior, expected: Expected | None) -> po.Joint:
        return doubled(joint, posterior)


def test_a_step_that_need_not_climb_may_fall():
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    _, trace = run(VariationalEM(Conjugate(), Wandering(), rounds=4), joint, data)
    assert trace["bound"][-1] < trace["bound"][0]


def test_a_fit_between_exact_runs_may_lower_the_bound():
    joint = dataclasses.replace(tunable_regression(FLOAT64), random="2.*")
    _, trace = run(VariationalEM(Conjugate(), PriorScale(), fit=MAP(60, None, Adam(1.0))), joint, numbers(FLOAT64))
    assert float(trace["bound"].diff().min()) < -0.1


def test_each_round_has_draws_of_its_own():
    """Nothing moves here but the draws of the passes, which one key fixes."""
    still = VariationalEM(Laplace(tuning=None), lambda joint, posterior: joint, rounds=3, draws=4, tolerance=None)
    _, trace = run(still, classification(FLOAT64), labels(FLOAT64))
    assert len(set(trace["bound"].tolist())) == 1
    assert len(set(trace["expected_log_likelihood"].tolist())) == 4


def test_an_e_step_below_the_bound_after_the_last_m_step_is_refused():
    method, joint, data = VariationalEM(Conjugate(), BOTH), linear_regression(FLOAT64), po.as_data(numbers(FLOAT64))
    key, state = po.Key(0), method.init(joint, joint.initial(), po.Key(0))
    for number, batch in enumerate(method.batches(data, key).from_step(0)):
        if number == 3:  # the pass of the second round ends with this batch
            state = state._replace(bounds={**state.bounds, "moved": state.bounds["moved"] + 1.0})
            with pytest.raises(BoundFell, match="E-step of round 2"):
                method.step(joint, state, batch, key)
            return
        state, _ = method.step(joint, state, batch, key)
    pytest.fail("there was no second round")


def test_steps_that_are_not_exact_may_lower_their_bound():
    _, trace = run(VariationalEM(MeanField(20, 6), doubled, rounds=6), linear_regression(FLOAT64), numbers(FLOAT64))
    assert trace["bound"][-1] < trace["bound"].max()


@pytest.mark.parametrize("steps", [BOTH, (PriorScale(PerLayer(), Gamma(2.0, 1.0)), NoiseScale(Gamma(3.0, 0.1)))])
@pytest.mark.parametrize("tempering", [Tempering.bayes(), Tempering(0.5, 2.0)], ids=str)
def test_exact_bounds_rise_with_hyper_priors_and_tempering(steps, tempering):
    joint = dataclasses.replace(linear_regression(FLOAT64), tempering=tempering)
    _, trace = run(VariationalEM(Conjugate(), steps, rounds=15, tolerance=None), joint, numbers(FLOAT64))
    assert len(trace["bound"]) == 16
    assert bool((trace["bound"].diff()[:4] > 0).all())
    assert bool((trace["bound"].diff() > -1e-12).all())


def test_a_run_ends_where_the_bound_stands_still(caplog):
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    with caplog.at_level(logging.INFO, "posterity"):
        q, trace = run(VariationalEM(Conjugate(), BOTH, rounds=500, tolerance=1e-6), joint, data)
    count = len(trace["bound"])
    assert 3 < count < 400
    assert f"the bound stands still after {count} rounds" in caplog.text
    assert float(trace["noise_scale"][-1]) == float(trace["noise_scale"][-2])  # no M-step once it stands still
    change = (trace["bound"].diff() / trace["bound"][1:]).abs()
    assert change[-1] <= 1e-6 < change[-2]
    assert q.joint.likelihood.scale == float(trace["noise_scale"][-1])  # those that the posterior was made with
    torch.testing.assert_close(q.log_evidence.cpu(), trace["bound"][-1])


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64], ids=str)
def test_targets_far_from_zero_with_little_noise_are_no_fall(dtype):
    """At the origin the log-likelihood is -1e12 here, of which nothing may be left in the bound."""
    x, noise = po.Key(1).normal((2000, 3), FLOAT64), po.Key(2).normal((2000, 1), FLOAT64)
    y = x.sum(1, keepdim=True) + 50 + 1e-3 * noise
    joint = po.Joint(nn.Linear(3, 1).to(dtype), Gaussian(1.0), Normal(1.0), num_data=2000)
    q, trace = run(VariationalEM(Conjugate(), BOTH, rounds=60), joint, (x.to(dtype), y.to(dtype)))
    assert len(trace["bound"]) < 30
    assert q.joint.likelihood.scale == pytest.approx(1e-3, rel=0.1)
    assert float((trace["bound"].diff() / trace["bound"][1:].abs()).min()) > (-1e-10 if dtype == FLOAT64 else -1e-4)


def test_a_run_that_stood_still_is_taken_up_as_it_is(tmp_path: Path):
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    method = VariationalEM(Conjugate(), BOTH, rounds=500, tolerance=1e-4)
    first, trace = run(method, joint, data, checkpoint=tmp_path)
    again, traced = run(method, joint, data, checkpoint=tmp_path)
    assert torch.equal(first.point(), again.point())
    assert len(trace["bound"]) == len(traced["bound"]) < 400


def test_that_the_weights_are_not_at_a_mode_is_said_once(caplog):
    joint, data = tunable_regression(FLOAT64), numbers(FLOAT64)
    run(VariationalEM(Laplace(tuning=None), NoiseScale(), rounds=4), joint, data)
    assert caplog.text.count("The weights are not at a mode") == 1


@pytest.mark.parametrize(
    ("method", "places"),
    [
        (Conjugate(), [2, 3]),
        (Laplace(tuning=None, subset=LastLayer()), [2, 3]),
        (Laplace(tuning=None, subset=LargestVariance(15)), [0, 1]),
    ],
    ids=["conjugate", "last layer", "largest variances"],
)
def test_scales_of_points_stay(method, places):
    """The fit moves the weights that are points; nobody takes its moves for a fall of an exact bound."""
    joint = dataclasses.replace(tunable_regression(FLOAT64), random="2.*" if isinstance(method, Conjugate) else "*")
    em = VariationalEM(method, (PriorScale(PerTensor()), NoiseScale()), rounds=4, fit=MAP(100, None, Adam()))
    q, trace = run(em, joint, numbers(FLOAT64))
    assert trace["bound"][-1] > trace["bound"][0]
    moved = [index for index in range(4) if float((trace["prior_scale"][-1, index] - 0.7).abs()) > 1e-6]
    assert moved == places
    assert q.joint.likelihood.scale < 0.8


def test_noise_that_is_learnt_is_held_for_its_m_step():
    joint, data = regression(FLOAT64), numbers(FLOAT64)
    q, trace = run(VariationalEM(MeanField(30, 6), BOTH, rounds=3), joint, data)
    assert not q.joint.likelihood.learn
    assert q.joint.likelihood.scale == float(trace["noise_scale"][-1]) != 0.3
    alone, trace = run(VariationalEM(MeanField(30, 6), PriorScale(), rounds=3), joint, data)
    assert alone.joint.likelihood.scale == float(trace["noise_scale"][-1]) != 0.3
    fitted, _ = run(VariationalEM(Laplace(tuning=None), MacKayUpdate(), rounds=2, fit=MAP(50, None)), joint, data)
    assert not fitted.joint.likelihood.learn


def test_the_noise_of_a_start_is_where_it_begins():
    joint, data = regression(FLOAT64), numbers(FLOAT64)
    start, _ = po.infer(MAP(50, None), joint, data)
    seen = []

    def look(problem: po.Joint, posterior: Posterior) -> po.Joint:
        seen.append(problem.likelihood.scale)
        return problem

    run(VariationalEM(Laplace(tuning=None), (look, NoiseScale()), rounds=1), joint, data, start=start)
    assert seen == [pytest.approx(start.joint.likelihood.scale)]


def test_what_no_m_step_changes_need_not_be_stored():
    """A likelihood of the user's own has a function in it."""

    def log_prob(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(targets - outputs).abs().sum(-1)

    custom = po.likelihoods.Custom(log_prob)
    joint = dataclasses.replace(linear_regression(FLOAT64), likelihood=custom)
    q, _ = run(VariationalEM(MeanField(20, 6), PriorScale(), rounds=2), joint, numbers(FLOAT64))
    assert q.joint.likelihood is custom
    assert q.joint.prior.scale != 0.7


def test_the_fitted_problem_is_stored_with_the_posterior(tmp_path: Path):
    joint = regression(FLOAT64)
    q, _ = run(VariationalEM(MeanField(30, 6), (PriorScale(), NoiseScale()), rounds=3), joint, numbers(FLOAT64))
    q.save(tmp_path / "run")
    loaded = po.load(tmp_path / "run", network([3, 4, 1], FLOAT64))
    assert loaded.joint.likelihood == q.joint.likelihood
    assert loaded.joint.prior == q.joint.prior != joint.prior


@pytest.mark.parametrize("step_size", [None, 100.0], ids=["chains that move", "chains that never move"])
def test_chains_know_the_density_of_the_last_problem(step_size):
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    method = HMC(21, 5, 2, steps=3, step_size=step_size)
    q, trace = run(VariationalEM(method, BOTH, rounds=4), joint, data)
    assert q.theta.shape[:2] == (2, 11)  # 10 of the 21 belong to the rounds
    assert len(trace["expected_log_joint"]) == 5
    batch = po.as_data(data).first()
    values = q.joint.log_density(q.theta.flatten(0, 1).to(joint.device), batch).reshape(2, 11).cpu()
    torch.testing.assert_close(q.statistics["log_density"].cpu(), values)
    torch.testing.assert_close(trace["expected_log_joint"][-1], values.mean())  # 32 draws are more than all of them
    assert (float(values.std(1).max()) > 0.1) == (step_size is None)
    assert len(trace["accept"]) == 5 + 21


@pytest.mark.parametrize(("prior", "warned"), [(Normal(0.7), False), (po.priors.Laplace(0.7), True)])
def test_laplace_rounds_under_a_prior_without_curvature_are_warned_of(prior, warned, caplog):
    joint = dataclasses.replace(linear_regression(FLOAT64), prior=prior)
    run(VariationalEM(Laplace(tuning=None), PriorScale(), rounds=1, fit=MAP(20, None)), joint, numbers(FLOAT64))
    assert ("prior scales may run off" in caplog.text) == warned


@pytest.mark.parametrize("few", [1, 2, 3])
def test_chains_with_few_draws_have_fewer_rounds(few):
    q, trace = run(
        VariationalEM(HMC(few, 2, 2, steps=2), PriorScale(), rounds=9), classification(FLOAT64), labels(FLOAT64)
    )
    assert len(trace["expected_log_joint"]) == few // 2 + 1
    assert q.num_draws == few - few // 2


def test_statistics_of_batch_norm_are_those_of_the_fit():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    joint = po.Joint(net, Gaussian(0.5), Normal(1.0), num_data=20)
    for method, fit in ((MeanField(30, 10), None), (Laplace(tuning=None), MAP(30, 10))):
        q, _ = run(VariationalEM(method, BOTH, rounds=3, fit=fit), joint, numbers(FLOAT64))
        assert float(q.buffers["1.running_mean"].abs().max()) > 0.01
        mean = q.joint.outputs(q.point(), numbers(FLOAT64)[0], q.buffers)
        if fit is not None:
            torch.testing.assert_close(q.output_moments(numbers(FLOAT64)[0])[0], mean)


def test_plans_say_what_the_method_takes():
    joint, data = tunable_regression(FLOAT64), numbers(FLOAT64)
    alone = plan(MeanField(), joint, data)
    with_rounds = plan(VariationalEM(MeanField(), BOTH), joint, data)
    assert with_rounds.total > alone.total
    assert with_rounds.method == f"VariationalEM of 20 rounds by {alone.method}"
    fitted = plan(VariationalEM(Laplace(tuning=None), BOTH, fit=MAP(20)), joint, data)
    assert fitted.parts["optimiser"] == plan(MAP(20), joint, data).parts["optimiser"]
    assert fitted.predictions > 0


def wrong_type(joint: po.Joint, posterior: Posterior) -> Sequence[po.Joint]:
    return [joint]


def wrong_rows(joint: po.Joint, posterior: Posterior) -> po.Joint:
    return dataclasses.replace(joint, num_data=joint.num_data + 1)


def fewer(joint: po.Joint, posterior: Posterior) -> po.Joint:
    return dataclasses.replace(joint, random=torch.tensor([0]))


def learning(joint: po.Joint, posterior: Posterior) -> po.Joint:
    return dataclasses.replace(joint, likelihood=Gaussian(0.3, learn=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: VariationalEM(MAP, BOTH), TypeError, r"expectation must be a sampler .*Call it: MAP\(\)"),
        (lambda: VariationalEM(SWAG(), BOTH), TypeError, "expectation must be a sampler or one of Conjugate"),
        (lambda: VariationalEM(Laplace(), BOTH), ValueError, r"Use Laplace\(tuning=None\)"),
        (lambda: VariationalEM(MeanField(), BOTH, fit=MAP()), ValueError, "MeanField has steps of its own"),
        (lambda: VariationalEM(Laplace(tuning=None), BOTH, fit=MeanField()), TypeError, "fit must be a MAP, or None"),
        (lambda: VariationalEM(Conjugate(), MacKayUpdate()), ValueError, "MacKayUpdate takes the posterior of Laplace"),
        (lambda: VariationalEM(MAP(), ()), TypeError, r"maximisation must be M-steps"),
        (lambda: VariationalEM(MAP(), (PriorScale(), PriorScale())), ValueError, "one M-step of a kind.*Leave one out"),
        (lambda: VariationalEM(MAP(), (PriorScale,)), TypeError, r"maximisation must be M-steps"),
        (lambda: VariationalEM(MAP(), "scale"), TypeError, r"maximisation must be M-steps.*Got 'scale'"),
        (lambda: VariationalEM(MAP(), BOTH, rounds=0), ValueError, "VariationalEM.rounds must be a positive whole"),
        (lambda: VariationalEM(MAP(), BOTH, burn_in=1.0), ValueError, "VariationalEM.burn_in must be"),
        (lambda: VariationalEM(MAP(), BOTH, tolerance=-1.0), ValueError, "VariationalEM.tolerance must be"),
        (lambda: VariationalEM(MAP(), BOTH, draws=1), ValueError, "draws must be at least 2"),
        (lambda: VariationalEM(MAP(), BOTH, batch_size=0), ValueError, "VariationalEM.batch_size must be"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (wrong_type, TypeError, r"wrong_type must give a Joint. Got \[Joint"),
        (wrong_rows, ValueError, "wrong_rows may change prior and likelihood"),
        (fewer, ValueError, "fewer may change prior and likelihood"),
        (learning, ValueError, "learning must leave what the likelihood learns"),
    ],
)
def test_m_steps_that_give_something_else_are_refused(step, error, message):
    with pytest.raises(error, match=message):
        run(VariationalEM(MeanField(5, 6), step), linear_regression(FLOAT64), numbers(FLOAT64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"likelihood": StudentT(scale=0.3)}, "NoiseScale is for a Gaussian likelihood"),
        ({"prior": Horseshoe()}, "PriorScale: a Normal, Laplace or GroupLasso has a scale"),
    ],
)
def test_problems_without_such_hyper_parameters_are_refused_before_the_first_step(change, message):
    steps = []

    class Count(po.inference.Callback):
        def after_step(self, run: po.inference.Run) -> None:
            steps.append(run.step)

    joint = dataclasses.replace(linear_regression(FLOAT64), **change)
    with pytest.raises(ValueError, match=message):
        run(VariationalEM(MAP(50), BOTH), joint, numbers(FLOAT64), callbacks=[Count()])
    assert not steps


def test_a_network_that_knows_its_targets_is_told_so():
    """Noise goes to zero here, until rounding lowers the bound: the E-step itself is sound."""
    x = po.Key(0).normal((20, 3), FLOAT64)
    data, joint = (x, x.sum(1, keepdim=True)), po.Joint(nn.Linear(3, 1).double(), Gaussian(0.1), Normal(), num_data=20)
    with pytest.raises(BoundFell, match=r"E-step .*Noise of scale .* too small for torch.float64.*hyper_prior=Gamma"):
        run(VariationalEM(Conjugate(), BOTH, rounds=200, tolerance=None), joint, data)
    careful = (PriorScale(Shared()), NoiseScale(Gamma(1.0, 0.001)))
    q, _ = run(VariationalEM(Conjugate(), careful, rounds=200), joint, data)
    assert q.joint.likelihood.scale == pytest.approx(0.01, rel=0.1)  # (0.001 / (1 + 20 / 2))^1/2, and what q leaves


def test_a_run_that_stands_still_is_validated_at_its_last_step():
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    _, trace = run(VariationalEM(Conjugate(), BOTH, rounds=500), joint, data, validation=data)
    assert len(trace["bound"]) < 500
    assert trace.steps("validation_nll").tolist() == trace.steps("bound")[-1:].tolist()


def test_validation_before_the_first_curvature_is_that_of_the_fit():
    method = VariationalEM(Laplace(tuning=None), BOTH, rounds=2, fit=MAP(5, None))
    joint, data = tunable_regression(FLOAT64), numbers(FLOAT64)
    _, trace = run(method, joint, data, validation=data, callbacks=[po.inference.Validation(1)])
    _, alone = run(MAP(5, None), joint, data, validation=data, callbacks=[po.inference.Validation(1)])
    assert float(trace["validation_nll"][0]) == pytest.approx(float(alone["validation_nll"][0]), rel=1e-12)


def test_problems_that_it_cannot_fit_are_refused():
    joint, data, method = linear_regression(FLOAT64), numbers(FLOAT64), VariationalEM(MeanField(5, 6), BOTH)
    with pytest.raises(TypeError, match=r"VariationalEM needs a Joint.*Got a Density"):
        run(method, po.Density(lambda x: -x.square().sum(), {"x": (2,)}), None)
    with pytest.raises(ValueError, match="Got a Joint of 2 members"):
        run(method, dataclasses.replace(joint, prior=Normal(torch.tensor([1.0, 2.0]))), data)
    with pytest.raises(ValueError, match="fits one theta at a time"):
        run(method, joint, data, start=joint.initial().expand(2, -1))
    x, y = data
    with pytest.raises(BadData, match="VariationalEM fits one data set"):
        run(method, joint, po.as_data((x.expand(2, -1, -1), y.expand(2, -1, -1)), per_member=True))
    with pytest.raises(ValueError, match="NoiseScale is for a Gaussian likelihood"):
        run(method, dataclasses.replace(joint, likelihood=StudentT(scale=0.3)), data)
    noise = Gaussian(0.3, learn=True, log_scale_prior=(-1.0, 0.5))
    with pytest.raises(ValueError, match="no use for log_scale_prior"):
        run(method, dataclasses.replace(joint, likelihood=noise), data)
