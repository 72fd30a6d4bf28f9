"""The gold loader itself: every file loads, and a wrong value fails."""

import json

import pytest
import torch
from goldcases import FOLDER, GoldCase, load

CASES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "index")


def small_case(**overrides: dict[str, float | bool]) -> GoldCase:
    expected = {
        "table": {"rows": [{"M": 2.0, "slope": 1.0}, {"M": 4.0, "slope": 1.0}], "slope": 3.0},
        "vector": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "scalar": 5.0,
    }
    mistakes = {"note": "text", "vector_if_swapped": torch.tensor([2.0, 1.0]), "scalar_if_wrong": 5.5}
    return GoldCase("small", {}, expected, mistakes, {"rtol": 1e-8, "atol": 0.0, "overrides": overrides})


@pytest.mark.parametrize("case_id", CASES)
def test_every_case_accepts_its_own_numbers(case_id: str) -> None:
    case = load(case_id)
    compared = 0
    stack = [(key, value) for key, value in case.expected.items()]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{path}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}.{index}", item) for index, item in enumerate(value)]
        elif isinstance(value, (torch.Tensor, float)) and "log_alpha" not in path:
            case.check(path, value)
            compared += 1
    assert compared > 0 or case_id == "penalty_to_prior_deconvolution"


def test_index_lists_every_file() -> None:
    assert sorted(entry["id"] for entry in json.loads((FOLDER / "index.json").read_text())) == CASES


def test_a_value_off_by_more_than_the_tolerance_fails() -> None:
    small_case().check("scalar", 5.0 + 4e-8)
    with pytest.raises(AssertionError, match=r"small\.scalar"):
        small_case().check("scalar", 5.0 + 6e-8)


def test_a_value_of_another_shape_fails_instead_of_broadcasting() -> None:
    with pytest.raises(AssertionError):
        small_case().check("vector", torch.tensor([[1.0, 2.0]]))


def test_overrides_apply_below_a_key_or_a_dotted_path() -> None:
    case = small_case(slope={"rtol": 0.0, "atol": 0.1})
    case.check("table.rows.1.slope", 1.05)
    case.check("table.slope", 3.05)
    with pytest.raises(AssertionError):
        case.check("table.rows.0.M", 2.05)
    dotted = small_case(**{"table.rows": {"rtol": 0.0, "atol": 0.1}})
    dotted.check("table.rows.0.M", 2.05)
    with pytest.raises(AssertionError):
        dotted.check("table.slope", 3.05)


def test_the_longer_override_wins_and_ignore_skips() -> None:
    case = small_case(**{"table.rows.slope": {"rtol": 0.0, "atol": 0.5}, "slope": {"rtol": 0.0, "atol": 0.1}})
    case.check("table.rows.0.slope", 1.4)
    small_case(scalar={"ignore": True}).check("scalar", 100.0)
    with pytest.raises(AssertionError):
        case.check("table.slope", 3.4)


def test_known_mistakes_are_refused_even_inside_the_tolerance() -> None:
    case = small_case(scalar={"rtol": 1e-8, "atol": 1.0})
    case.check("scalar", 5.4)
    with pytest.raises(AssertionError, match="scalar_if_wrong"):
        case.check("scalar", 5.5)


def test_unknown_paths_say_what_is_known() -> None:
    with pytest.raises(KeyError, match="vector"):
        small_case().check("vectors", 1.0)
