"""The doors of `infer`: every bad argument is one line that says what was wanted, what came and what to do."""

import copy

import numpy as np
import pytest
import torch
from contracts.cases import classification, labels, linear_regression, network, numbers, regression
from matrixcases import as_matrix
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.errors import BadData
from posterity.inference import Callback, EarlyStopping, Validation
from posterity.inference.infer import starting_point
from posterity.methods import MAP, Conjugate, Laplace
from posterity.model import Tempering
from posterity.model.data import as_data

FLOAT64 = torch.float64
QUICK = MAP(steps=2)


def density():
    return po.Density(lambda u: -0.5 * u.square().sum(), {"u": (3,)}, dtype=FLOAT64)


def spoiled(index, value):
    rows = [t.clone() for t in numbers(FLOAT64)]
    rows[index][4, 0] = value
    return tuple(rows)


REFUSALS = [
    (
        lambda: po.infer(MAP, regression(FLOAT64), numbers(FLOAT64)),
        TypeError,
        r"a Method\. Got <class .*Call it: MAP\(\)",
    ),
    (lambda: po.infer("map", regression(FLOAT64), numbers(FLOAT64)), TypeError, r"a Method\. Got 'map'"),
    (lambda: po.infer(QUICK, torch.nn.Linear(1, 1), numbers(FLOAT64)), TypeError, r"a Joint or a Density\. Got Linear"),
    (lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), seed=0.5), TypeError, r"whole number\. Got 0\.5"),
    (lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), seed=True), TypeError, r"whole number\. Got True"),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), callbacks=EarlyStopping()),
        TypeError,
        r"must be a list of callbacks.*Put it in a list",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), callbacks=[EarlyStopping]),
        TypeError,
        r"in it\. Call it: EarlyStopping\(\)",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), callbacks=[EarlyStopping()]),
        ValueError,
        r"EarlyStopping needs validation data\. Pass infer",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), callbacks=[Validation(5)]),
        ValueError,
        r"Validation needs validation data\. Pass infer",
    ),
    (lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), checkpoint=3), TypeError, r"folder's path\. Got 3"),
    (lambda: po.infer(QUICK, density(), numbers(FLOAT64)), BadData, r"data inside\. Pass None"),
    (lambda: po.infer(QUICK, regression(FLOAT64), None), BadData, r"needs data\. Pass \(inputs, targets\)"),
    (lambda: po.infer(QUICK, density(), None, validation=numbers(FLOAT64)), TypeError, r"Leave validation out"),
    (lambda: po.infer(Laplace(tuning=None), density(), None), TypeError, r"Use the curvature Hessian\(\)"),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), tuple(t[:15] for t in numbers(FLOAT64))),
        BadData,
        r"num_data is 20 but the data have 15 rows.*Make the Joint with num_data=15",
    ),
    (lambda: po.infer(QUICK, regression(FLOAT64), spoiled(0, float("nan"))), BadData, r"inputs must be finite.*row 4"),
    (lambda: po.infer(QUICK, regression(FLOAT64), spoiled(0, float("inf"))), BadData, r"inputs must be finite.*row 4"),
    (lambda: po.infer(QUICK, regression(FLOAT64), spoiled(1, float("inf"))), BadData, r"targets must be finite.*row 4"),
    (
        lambda: po.infer(
            QUICK, regression(FLOAT64), DataLoader(TensorDataset(*spoiled(1, float("inf"))), batch_size=5)
        ),
        BadData,
        r"targets must be finite",
    ),
    (
        lambda: po.infer(QUICK, classification(FLOAT64), (labels(FLOAT64)[0], labels(FLOAT64)[1] + 1)),
        BadData,
        r"must lie in 0\.\.1 for 2 classes\. Got 2",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(torch.float32)),
        BadData,
        r"model's dtype float64\. Got float32",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), validation=spoiled(1, float("inf"))),
        BadData,
        r"targets must be finite",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), start=[0.0]),
        TypeError,
        r"start must be a Posterior",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), start=torch.zeros(3, dtype=FLOAT64)),
        ValueError,
        r"start must have 22 entries.*Got shape \(3,\)",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), start=torch.zeros(2, 2, 22, dtype=FLOAT64)),
        ValueError,
        r"start must have 22 entries.*Got shape \(2, 2, 22\)",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), start=torch.zeros(0, 22, dtype=FLOAT64)),
        ValueError,
        r"Got shape \(0, 22\)",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), start=torch.tensor(0.0, dtype=FLOAT64)),
        ValueError,
        r"Got shape \(\)",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), start=torch.zeros(22)),
        ValueError,
        r"dtype torch\.float64\. Got torch\.float32\. Convert",
    ),
    (
        lambda: po.infer(
            QUICK, regression(FLOAT64), numbers(FLOAT64), start=torch.full((22,), float("nan"), dtype=FLOAT64)
        ),
        ValueError,
        r"must be finite\. Got NaN or infinity in '0\.weight'",
    ),
    (
        lambda: po.infer(
            QUICK, regression(FLOAT64), numbers(FLOAT64), start=fit(classification(FLOAT64), labels(FLOAT64))
        ),
        ValueError,
        r"another network: it has no '2\.weight' of shape \(1, 4\)",
    ),
    (
        lambda: po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), start=fit(density(), None)),
        ValueError,
        r"posterior of a Density, and this problem is a Joint",
    ),
    (
        lambda: po.infer(
            QUICK, regression(FLOAT64), numbers(FLOAT64), start=fit(regression(torch.float32), numbers(torch.float32))
        ),
        ValueError,
        r"dtype torch\.float64\. Got torch\.float32",
    ),
    (
        lambda: po.infer(QUICK, with_members(3), numbers(FLOAT64), start=regression(FLOAT64).initial().expand(2, -1)),
        ValueError,
        r"each of the 3 members of the joint\. Got 2",
    ),
    (
        lambda: po.infer(
            QUICK, with_members(3), po.as_data([t.expand(2, *t.shape) for t in numbers(FLOAT64)], per_member=True)
        ),
        ValueError,
        r"each of the 2 members of the data\. Got 3",
    ),
    (
        lambda: po.infer(Conjugate(), classification(FLOAT64), labels(FLOAT64)),
        ValueError,
        r"Gaussian likelihood of fixed",
    ),
    (
        lambda: po.infer(Conjugate(), curved(), numbers(FLOAT64)),
        ValueError,
        r"linear in its weights, and this one is not",
    ),
    (
        lambda: po.infer(Conjugate(), with_members(2, linear_regression(FLOAT64)), numbers(FLOAT64)),
        ValueError,
        r"one problem at a time\. Use joint\.member\(i\)",
    ),
]


def fit(problem, data):
    return po.infer(QUICK, problem, data)[0]


def with_members(count, problem=None):
    problem = problem or regression(FLOAT64)
    tempering = Tempering.tempered(torch.linspace(1.0, 2.0, count))
    return po.Joint(problem.network, problem.likelihood, problem.prior, problem.num_data, tempering)


def curved():
    return po.Joint(network([3, 4, 1], FLOAT64), po.likelihoods.Gaussian(0.3), po.priors.Normal(1.0), 20)


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[row[2] for row in REFUSALS])
def test_refuses(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ValueError, r"MAP\.steps must be a positive whole number\. Got 0"),
        ({"steps": 1e3}, ValueError, r"MAP\.steps must be a positive whole number\. Got 1000\.0"),
        ({"batch_size": -1}, ValueError, r"MAP\.batch_size must be"),
        ({"optimizer": "adam"}, TypeError, r"MAP\.optimizer must be of kind Optimizer\. Got 'adam'"),
        ({"schedule": 0.5}, TypeError, r"MAP\.schedule must be of kind Schedule\. Got 0\.5"),
    ],
    ids=str,
)
def test_map_refuses(options, error, message):
    with pytest.raises(error, match=message):
        MAP(**options)


@pytest.mark.parametrize(
    "options", [{"curvature": "ggn"}, {"structure": "full"}, {"structure": po.precisions.Diagonal}]
)
def test_laplace_refuses_names_in_the_place_of_objects(options):
    (name,) = options
    with pytest.raises(TypeError, match=f"Laplace.{name} must be of kind {name.capitalize()}"):
        Laplace(tuning=None, **options)


def test_a_matrix_that_does_not_fit_the_machine_is_refused_before_it_is_made(monkeypatch):
    wide = po.Joint(
        torch.nn.Linear(3, 300_000), po.likelihoods.Gaussian(0.3), po.priors.Normal(), num_data=20
    )  # 1.2 million weights: 69 TB
    rows = (numbers(torch.float32)[0], torch.zeros(20, 300_000))
    with pytest.raises(ValueError, match=r"Full\(\) over 1,200,000 weights needs about 5\.76e\+04 GB.*Use structure="):
        po.infer(Laplace(tuning=None, structure=po.curvature.Full()), wide, rows)
    monkeypatch.setattr("posterity.inference.memory.device_memory", lambda device: None)  # a system that cannot tell
    po.infer(Laplace(tuning=None), classification(FLOAT64), labels(FLOAT64))
    needed = po.plan(Laplace(tuning=None), classification(FLOAT64), labels(FLOAT64)).total
    monkeypatch.setattr("posterity.inference.memory.device_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match="over 26 weights"):
        po.infer(Laplace(tuning=None), classification(FLOAT64), labels(FLOAT64))
    po.infer(Laplace(tuning=None, structure=po.curvature.Diagonal()), classification(FLOAT64), labels(FLOAT64))


def test_the_starting_point_is_a_copy():
    given = regression(FLOAT64).initial()
    for joint, start in ((regression(FLOAT64), given), (regression(FLOAT64), None), (with_members(2), given)):
        _, theta = starting_point(QUICK, joint, start, po.as_data(numbers(FLOAT64)), po.Key(0))
        assert theta.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        assert torch.equal(theta, given.expand_as(theta) if start is not None else joint.initial())


def test_numpy_seed_is_the_seed():
    first, _ = po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), seed=3)
    second, _ = po.infer(QUICK, regression(FLOAT64), numbers(FLOAT64), seed=np.int64(3))
    assert torch.equal(first.point(), second.point())


def test_arrays_and_datasets_are_data():
    x, y = numbers(FLOAT64)
    of_tensors = fit(linear_regression(FLOAT64), (x, y))
    for data in ((x.cpu().numpy(), y.cpu().numpy()), TensorDataset(x, y), (x, y[:, 0])):
        assert torch.equal(fit(linear_regression(FLOAT64), data).point(), of_tensors.point())


def test_hooks_run_in_order_and_end_is_called_whatever_happens():
    calls = []

    class Notes(Callback):
        def start(self, run):
            calls.append(("start", run.step))

        def after_step(self, run):
            calls.append(("step", run.step))
            if run.step == 2:
                raise RuntimeError("enough")

        def end(self, run):
            calls.append(("end", run.step))

    with pytest.raises(RuntimeError, match="enough"):
        po.infer(MAP(steps=5), regression(FLOAT64), numbers(FLOAT64), callbacks=[Notes()])
    assert calls == [("start", 0), ("step", 1), ("step", 2), ("end", 2)]


def test_a_callback_can_stop_the_run():
    class Stop(Callback):
        def after_step(self, run):
            if run.step == 3:
                run.stopped = "seen enough"

    adam = po.optim.Adam()
    q, trace = po.infer(MAP(9, optimizer=adam), regression(FLOAT64), numbers(FLOAT64), callbacks=[Stop()])
    short, _ = po.infer(MAP(3, optimizer=adam), regression(FLOAT64), numbers(FLOAT64))
    assert trace.steps("loss").tolist() == [1, 2, 3]
    assert torch.equal(q.point(), short.point())


def test_methods_can_be_stepped_by_hand():
    """A person with a loop of their own calls init and step, and gets what `infer` gets."""
    joint, rows = regression(FLOAT64), numbers(FLOAT64)
    q, _ = po.infer(MAP(steps=4, batch_size=None), joint, rows)
    method, key = MAP(steps=4, batch_size=None).settled(joint, as_data(rows)), po.Key(0)
    state = method.init(joint, joint.initial(), key)
    for step in range(4):
        state, _ = method.step(joint, state, po.model.Batch(*rows), key.fold(step))
    assert torch.equal(method.posterior(joint, [state]).point(), q.point())


def test_a_density_is_inferred_without_data():
    q, _ = po.infer(MAP(steps=300, optimizer=po.optim.SGD(0.1)), density(), None, start=torch.ones(3, dtype=FLOAT64))
    assert q.point().abs().max() < 1e-6
    laplace, _ = po.infer(Laplace(tuning=None, curvature=po.curvature.Hessian()), density(), None, start=q)
    torch.testing.assert_close(as_matrix(laplace.precision), torch.eye(3, dtype=FLOAT64))
    members, _ = po.infer(
        Laplace(tuning=None, curvature=po.curvature.Hessian()), density(), None, start=torch.zeros(2, 3, dtype=FLOAT64)
    )
    torch.testing.assert_close(members.precision.covariance(), torch.eye(3, dtype=FLOAT64).expand(2, 3, 3))
    torch.testing.assert_close(as_matrix(members.member(1).precision), torch.eye(3, dtype=FLOAT64))


def test_inputs_of_several_tensors():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)

        def forward(self, a, b):
            return self.first(a) * self.second(b)

    torch.manual_seed(0)
    module, (x, y) = Two().double(), numbers(FLOAT64)
    joint = po.Joint(copy.deepcopy(module), po.likelihoods.Gaussian(0.3), po.priors.Normal(0.5), num_data=20)
    by_place, _ = po.infer(Laplace(tuning=None, batch_size=7), joint, ((x, y), y))
    by_name, _ = po.infer(Laplace(tuning=None, batch_size=7), joint, ({"a": x, "b": y}, y))
    assert torch.equal(as_matrix(by_place.gaussian.precision), as_matrix(by_name.gaussian.precision))
    assert torch.equal(by_place.predict((x, y)).variance, by_name.predict({"b": y, "a": x}).variance)
