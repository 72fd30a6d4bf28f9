"""`posterity penalty`: the verdict, the way back, layers, figures, formulas, and what is refused."""

import json
import math

import pytest
import torch

from posterity.cli.verbs.penalty.words import FUNCTIONS, expression
from posterity.networks import LeNet
from posterity.penalties import GroupLasso, SquaredL2, layer_factors, usual_factors
from posterity.priors import He

pytestmark = pytest.mark.cpu


@pytest.fixture
def found(run):
    """A function that runs `posterity penalty` with these words and gives its JSON document."""

    def call(*words):
        result = run("penalty", *words, "--json")
        assert (result.code, result.err) == (0, "")
        return json.loads(result.out)

    return call


def test_weight_decay_is_a_normal_prior(run, found):
    result = run("penalty", "l2", "--factor", "2")
    assert result.code == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0] == "r = 2 sum of w^2, read by points: a prior"
    assert "  prior      normal, mean 0, scale 0.5" in lines
    assert "  density    p(w) = exp(-w^2 / 0.5) / 1.25331" in lines
    assert "  variance   0.25 of one weight" in lines
    document = found("l2", "--factor", "2")
    assert document["satisfies_star"]
    assert document["prior"]["variance"] == pytest.approx(0.25)
    assert document["K"] == pytest.approx(-0.5 * math.log(math.pi / 2.0))


def test_l1_on_the_means_of_gaussians_is_none(run, found):
    result = run("penalty", "l1", "--sigma", "0.5")
    assert result.code == 0
    assert result.out.startswith("r = sum of |w|, read by Gaussians of fixed scale 0.5: no prior\n  why not    ")
    assert "has a kink at 0" in result.out
    assert "  nearest    KL(Gaussians of fixed scale 0.5 || Laplace(scale=1.0, mean=0.0)): E|w| + log(2)" in result.out
    document = found("l1", "--sigma", "0.5")
    assert not document["satisfies_star"]
    assert document["prior"] is None
    assert document["kappa"] is None
    assert document["residual"] is None


def test_a_formula_is_inverted(found):
    quartic = found("mu^4", "--sigma", "0.5")["prior"]
    assert quartic["density"] == "exp(-w^4 + 1.5 w^2 - 1.30892)"  # t^4 - 6 sigma^2 t^2 + 3 sigma^4
    both = found("mu^4 + 0.3*cos(2*mu)", "--sigma", "0.5")
    assert both["penalty"] == "sum of (mu^4 + 0.3*cos(2*mu))"
    assert f"- {0.3 * math.exp(0.5):.6g} cos(2 w)" in both["prior"]["density"]
    varying = found("mu^4", "--sigma", "0.2,0.5")
    assert varying["prior"] is None
    assert varying["priors_at_fixed_sigma"]["0.5"] == quartic["density"]
    kl = found("mu^2/2 + sigma^2/2 - log(sigma) - 0.5")
    assert kl["family"] == "Gaussians of any scale"
    assert kl["prior"]["name"] == "normal, mean 0, scale 1"


def test_what_is_beyond_all_numbers_is_told_by_its_logarithm(run, found):
    result = run("penalty", "mu^2 + 1000")
    assert "p(w) = exp(999.428 - r(w))" in result.out
    assert "kappa exp(-999.428)" in result.out
    assert found("l2", "--factor", "1e4", "--sigma", "0.5")["prior"]["name"] == "normal, mean 0, scale 0.00707107"
    assert "  why  " in run("penalty", "mu^4", "--sigma", "100").out  # a prior, if no table of one
    assert "of 1000000 weights" in run("penalty", "rows", "--shape", "1000000,1000000").out


def test_what_is_not_known_is_said(run, found):
    assert "fixed scale 1: not known\n" in run("penalty", "exp(mu) + exp(-mu)", "--sigma", "1").out
    document = found("exp(mu) + exp(-mu)", "--sigma", "1")
    assert (document["satisfies_star"], document["decided"]) == (False, False)


def test_a_longer_reach_tells_more_of_the_tails(found):
    near, far, farthest = (found("log(1 + mu^2)", "--sigma", "0.3", "--reach", reach) for reach in (4, 12, 40))
    assert abs(far["K"] - farthest["K"]) < 0.3 * abs(near["K"] - farthest["K"])
    assert "% of the prior lies beyond -4 and 4" in near["explanation"]


def test_groups_have_a_size(run):
    result = run("penalty", "columns", "--shape", "300,20,3,3")
    assert "  groups     of 300 weights, in a tensor of shape (300, 20, 3, 3)" in result.out
    assert "  variance   301 of one weight" in result.out
    assert "kappa exp(" in result.out  # beyond the largest number


@pytest.mark.parametrize(
    ("prior", "points", "kl"),
    [
        ("normal:0.5", "2 sum of w^2", "log(0.5 / sigma) + (sigma^2 + mu^2) / 0.5 - 1/2"),
        ("laplace:0.5", "2 sum of |w|", "2 E|w| - log(sigma sqrt(2 pi e)), E|w| ="),
        ("student-t:3,0.5", "-log StudentT(", "-E log p(w)"),
        ("rows:2", "2 sum of ||w_g|| over rows", "2 E||w_g|| + log Z"),
    ],
)
def test_a_prior_is_a_penalty(run, found, prior, points, kl):
    result = run("penalty", "--prior", prior, "--sigma", "0.5,1")
    assert result.code == 0
    assert f"  by points  {points}" in result.out
    assert f"  KL         r(mu, sigma) = {kl}" in result.out
    assert "sigma 0.5" in result.out
    values = found("--prior", prior, "--sigma", "0.5,1")["values"]
    assert [row["mu"] for row in values] == [0.0, 0.5, 1.0, 2.0]
    assert all(value >= 0.0 for row in values for value in row["r"])


def test_a_density_without_end_is_null_in_json(found):
    document = found("--prior", "horseshoe:0.3", "--family", "dirac")
    assert (document["K"], document["kappa"]) == (0.0, 1.0)
    assert [row["r"][0] is None for row in document["values"]] == [True, False, False, False]


@pytest.mark.parametrize(
    ("prior", "density"),
    [
        ("laplace:1", "exp(-|w|) / 2"),
        ("laplace:0.5", "exp(-|w| / 0.5)"),
        ("cauchy:1", "1 / (3.14159 (1 + w^2))"),
        ("student-t:1,1", "(1 + w^2)^(-1) / Z"),
        ("logistic:0.5", "1 / (2 cosh(w)^2)"),
    ],
)
def test_ones_are_not_written(found, prior, density):
    assert found("--prior", prior)["prior"]["density"] == density


def test_a_fit_says_how_close_it_is(run):
    out = run("penalty", "sqrt(1 + mu^2)", "--sigma", "0.3").out
    headline = out.splitlines()[0]
    assert ": a prior, to within " in headline
    assert "for one prior: yes, to within " in out
    assert "to within" not in run("penalty", "mu^4", "--sigma", "0.3").out


def test_the_values_are_those_of_the_kl(found):
    rows = found("--prior", "normal:0.5", "--sigma", "0.25")["values"]
    for row in rows:
        expected = math.log(2.0) + (0.0625 + row["mu"] ** 2) / 0.5 - 0.5
        assert row["r"] == pytest.approx([expected])


def test_layers_are_those_of_the_library(run, found):
    net = LeNet()
    document = found("rows", "--net", "lenet", "--rule", "he", "--rows", "60000")
    layers = {layer["name"]: layer for layer in document["layers"]}
    factors, usual = layer_factors(net, GroupLasso(), He()), usual_factors(net, GroupLasso())
    assert {name: layer["lambda"] for name, layer in layers.items()} == factors
    assert {name: layer["usual_lambda"] for name, layer in layers.items()} == usual
    assert layers["3.weight"]["fan_in"] == 150
    assert layers["3.weight"]["variance"] == pytest.approx(2 / 150)
    assert layers["3.weight"]["factor"] == pytest.approx(factors["3.weight"] / 60000)
    decay = found("l2", "--factor", "7", "--net", "mlp:784,300,10", "--rows", "60000")["layers"]
    assert [layer["weight_decay"] for layer in decay] == pytest.approx([784 / 60000, 300 / 60000])
    result = run("penalty", "l2", "--net", "resnet-20", "--rule", "edge-of-chaos:relu")
    assert "10.conv2.weight   64x64x3x3      576   0.003472" in result.out
    assert "weight_decay" not in result.out


def test_layers_use_no_memory_and_no_random_numbers(found):
    before = torch.random.get_rng_state()
    layers = found("l2", "--net", "vgg19")["layers"]
    assert torch.equal(before, torch.random.get_rng_state())
    assert len(layers) == 17
    assert layers[0]["lambda"] == SquaredL2().factor(1 / 27, (64, 3, 3, 3))


@pytest.mark.parametrize(
    "words",
    [
        ("l2",),
        ("l1", "--sigma", "0.2,0.5"),
        ("mu^4", "--sigma", "0.2,0.5"),
        ("rows", "--sigma", "0.5"),
        ("cos(mu)",),
        ("--prior", "columns:2"),
    ],
)
def test_figures(run, tmp_path, words):
    file = tmp_path / "new" / "figure.svg"
    result = run("penalty", *words, "--plot", file)
    assert result.code == 0
    assert f"figure: {file}" in result.out
    assert "<svg" in file.read_text()


def test_the_edge_of_chaos(run, found, tmp_path, monkeypatch):
    from posterity.cli.verbs.penalty import networks

    monkeypatch.setattr(networks, "DEPTH", 6)
    monkeypatch.setattr(networks, "WIDTH", 60)
    file = tmp_path / "signals.png"
    result = run("penalty", "--edge-of-chaos", "relu", "--plot", file)
    assert result.out.startswith("relu, biases of variance 0: on the edge of chaos sigma_w^2 = 2, keeps any q\n")
    assert file.read_bytes().startswith(b"\x89PNG")
    document = found("--edge-of-chaos", "tanh,0.05")
    assert document["weight_variance"] == pytest.approx(1.76095, abs=1e-5)
    below, at, above = document["signals"]
    assert len(at["variance"]) == 7
    assert below["mean_field_correlation"][-1] > at["mean_field_correlation"][-1] > above["mean_field_correlation"][-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "One of PENALTY, --prior and --edge-of-chaos is needed. Got none."),
        (("l2", "--prior", "laplace:1"), "Got 2."),
        (("l3",), "Unknown penalty 'l3'. Did you mean 'l2'?"),
        (("2mu",), "Write products with *"),
        (("foo(mu)",), "Unknown function 'foo'"),
        (("mu + nu",), "Unknown name 'nu'"),
        (("mu.real",), "no formula of mu and sigma"),
        (("__import__('os').getcwd()",), "no formula of mu and sigma"),
        (("3",), "does not depend on mu"),
        (("cos(mu, 2)",), "cos takes one argument"),
        (("log(mu)",), "must be finite for every mu"),
        (("9^9^9^9 * mu",), "must be finite for every mu"),
        (("mu^2 - log(sigma)", "--family", "dirac"), "Read it by posteriors with a width, as --sigma 0.5."),
        (
            ("log(mu - sigma)", "--sigma", "0.5"),
            "must be finite for every mu and sigma. Got nan at mu = -4, sigma = 0.5.",
        ),
        (("mu^4 + 0.3*cos(2*mu)", "--net", "lenet"), "at more than one place, and their variance stays at 0.25"),
        (("(" * 300 + "mu" + ")" * 300,), "between 1 and 500 characters"),
        (("l2", "--factor", "-1"), "--factor must be a positive number. Got -1.0."),
        (("l2", "--sigma", "0"), "--sigma must be a positive number"),
        (("l2", "--sigma", "0.5,0.5"), "several that differ"),
        (("l2", "--sigma", "wide"), "--sigma needs numbers"),
        (("l2", "--family", "dirac", "--sigma", "1"), "points have no width"),
        (("l2", "--family", "gausian"), "Did you mean 'gaussian'?"),
        (("rows", "--shape", "3"), "at least two numbers"),
        (("--prior", "laplac:1"), "Did you mean 'laplace'?"),
        (("--prior", "laplace"), "--prior must be laplace:NUMBER"),
        (("--prior", "laplace:-1"), "must be a positive number"),
        (("--prior", "laplace:1", "--factor", "2"), "--factor is for a PENALTY"),
        (("--prior", "laplace:1", "--factor", "1"), "--factor is for a PENALTY"),
        (("--prior", "cauchy:1", "--net", "lenet"), "Cauchy has no variance to match"),
        (("l2", "--net", "lennet"), "Did you mean 'lenet'?"),
        (("l2", "--net", "mlp:3,x"), "--net mlp needs whole numbers"),
        (("l2", "--net", "lenet", "--rule", "glorott"), "Did you mean 'glorot'?"),
        (("l2", "--net", "lenet", "--rule", "edge-of-chaos:softplus"), "softplus has no edge"),
        (("l2", "--net", "lenet", "--rows", "0"), "--rows must be a positive whole number"),
        (("l2", "--rows", "5"), "--rows is for --net"),
        (("cos(mu)", "--net", "lenet"), "does not integrate"),
        (("l2", "--plot", "x.bmp"), "must be a .png, .pdf or .svg file"),
        (("l2", "--plot", "{file}/x.png"), "Cannot write"),
        (("--edge-of-chaos", "tahn"), "Unknown activation 'tahn'"),
        (("--edge-of-chaos", "tanh", "--net", "lenet"), "--net has no meaning with --edge-of-chaos"),
        (("--edge-of-chaos", "tanh", "--sigma", "1"), "--sigma has no meaning with --edge-of-chaos"),
        (("l2", "--rule", "he"), "--rule is for --net"),
        (("--prior", "rows:2", "--shape", "3"), "at least two numbers"),
        (("--prior", "normal:1e-200"), "must be between 1e-50 and 1e+50. Got 1e-200."),
        (("l2", "--factor", "1e300"), "--factor must be between"),
        (("l2", "--sigma", "1e-300"), "--sigma must be between"),
        (("--edge-of-chaos", "tanh,0.05,3"), "an activation and one number"),
        (("l2", "--net", "lenet", "--rule", "edge-of-chaos:tanh,0.05,3"), "an activation and one number"),
        (("log(1 + mu^2)", "--sigma", "100"), "--reach must be at least 2 times"),
        (("log(1 + mu^2)", "--sigma", "1e-9"), "or read it by --family dirac"),
        (("log(1 + mu^2)", "--sigma", "1", "--reach", "0"), "--reach must be a positive number"),
        (("log(1 + mu^2)", "--reach", "5"), "--reach is for --family gaussian"),
        (("--prior", "laplace:1", "--reach", "5"), "--reach is for a PENALTY"),
        (("--edge-of-chaos", "tanh", "--reach", "5"), "--reach has no meaning"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_and_a_hint(run, tmp_path, words, said):
    file = tmp_path / "file"
    file.touch()
    result = run("penalty", *(word.replace("{file}", str(file)) for word in words))
    assert result.code == 2
    assert result.out == ""
    error, hint = result.err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert hint.startswith("hint: ")


def test_formulas_mean_what_they_do_in_python():
    mu = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    sigma = torch.full_like(mu, 0.3)
    text = "-mu^2/sigma + 2*mu**-1 - 3*(mu - pi) + 1.5e-1 + +mu^2^2"
    expected = -(mu**2) / sigma + 2 * mu**-1 - 3 * (mu - math.pi) + 0.15 + mu**4
    torch.testing.assert_close(expression(text).value(mu, sigma), expected)
    for name in FUNCTIONS:
        torch.testing.assert_close(expression(f"{name}(mu)").value(mu, sigma), getattr(torch, name)(mu))
    assert expression("mu * 2").uses == {"mu"}
    assert [expression(text).text for text in ("mu + 1", "mu * 2")] == ["(mu + 1)", "mu * 2"]
