"""What a run depends on, and what is said of a folder that holds another."""

import pytest
import torch
from contracts.cases import numbers, regression

from posterity.errors import BadFolder
from posterity.inference.identity import identity, refuse_other
from posterity.methods import MAP
from posterity.model.data import as_data
from posterity.priors import Normal
from posterity.storage import Part


def test_each_thing_is_stored_in_the_form_that_tells_a_change():
    data, joint = as_data(numbers(torch.float64)), regression(torch.float64)
    part = identity(stages=(MAP(steps=3),), prior=Normal(0.5), data=data, model=joint, seed=3, start=torch.ones(2))
    assert part.config["stages"] == [repr(MAP(steps=3))]
    assert part.config["prior"] == repr(Normal(0.5))
    assert part.config["data"] == data.fingerprint()
    assert part.config["model"]["num_data"] == joint.num_data
    assert part.config["seed"] == 3
    assert torch.equal(part.tensors["start"], torch.ones(2))


def test_the_difference_is_told():
    with pytest.raises(BadFolder, match=r"'runs' holds another run: its seed differs: 3, now 4\. Use another folder"):
        refuse_other("runs", identity(method="MAP()", seed=4), identity(method="MAP()", seed=3))
    with pytest.raises(BadFolder, match=r"its rows differs: None, now 5\."):
        refuse_other("runs", identity(rows=5), Part({}))
    with pytest.raises(BadFolder, match=r"its start differs\."):
        refuse_other("runs", identity(start=torch.ones(2)), identity(start=torch.zeros(2)))
    with pytest.raises(BadFolder, match=r"its start differs\."):
        refuse_other("runs", Part({}), identity(start=torch.zeros(2)))


def test_types_that_an_older_release_stored_under_another_name_are_the_same():
    old, new = (
        Part({"start": {"type": "posteriors.Gaussian", "fields": {"precision": {"type": name, "fields": {}}}}})
        for name in ("numerics.Dense", "precisions.Dense")
    )
    refuse_other("run", new, old)
    with pytest.raises(BadFolder, match="its start differs"):
        refuse_other("run", old, new)
