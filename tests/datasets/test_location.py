"""Where data sets are looked for."""

import sys
from pathlib import Path

import pytest

from posterity.datasets import cache_folder, data_folder
from posterity.errors import BadData


@pytest.fixture
def places(tmp_path, monkeypatch):
    given, cache = tmp_path / "given", tmp_path / "cache"
    monkeypatch.setenv("POSTERITY_DATA", str(given))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return given, cache / "posterity"


def test_the_given_folder_comes_before_the_cache(places):
    for place in places:
        (place / "mnist").mkdir(parents=True)
    assert data_folder("mnist") == places[0] / "mnist"


def test_the_cache_serves_what_the_given_folder_lacks(places):
    places[0].mkdir()
    (places[1] / "mnist").mkdir(parents=True)
    assert data_folder("mnist") == places[1] / "mnist"


def test_an_empty_variable_counts_as_not_set(places, monkeypatch):
    monkeypatch.setenv("POSTERITY_DATA", "")
    (places[1] / "mnist").mkdir(parents=True)
    assert data_folder("mnist") == places[1] / "mnist"


def test_the_given_folder_may_start_at_home(places, monkeypatch):
    monkeypatch.setenv("HOME", str(places[0].parent))
    monkeypatch.setenv("POSTERITY_DATA", "~/given")
    (places[0] / "mnist").mkdir(parents=True)
    assert data_folder("mnist") == places[0] / "mnist"


def test_a_missing_data_set_says_where_it_was_looked_for_and_what_to_do(places):
    with pytest.raises(BadData) as caught:
        data_folder("mnist")
    message = str(caught.value)
    assert str(places[0]) in message
    assert str(places[1]) in message
    assert "set POSTERITY_DATA to the folder that holds 'mnist'" in message
    assert "\n" not in message


def test_a_missing_data_set_says_that_the_variable_is_not_set(places, monkeypatch):
    monkeypatch.delenv("POSTERITY_DATA")
    with pytest.raises(BadData, match=r"in [^ ]+ \(POSTERITY_DATA is not set\)\. Put"):
        data_folder("mnist")


def test_a_file_is_not_a_data_set(places):
    places[0].mkdir()
    (places[0] / "mnist").touch()
    with pytest.raises(BadData):
        data_folder("mnist")


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_a_relative_cache_is_ignored(places, monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder().is_absolute()
    assert cache_folder().is_relative_to(tmp_path)


def test_without_platformdirs_the_cache_is_in_the_home(places, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert cache_folder() == Path(tmp_path) / ".cache" / "posterity"
