"""Data that fit a problem."""

from dataclasses import replace

from posterity.errors import BadData
from posterity.model.data import Data, NoData, OwnOrders, Reordered, StreamData, TensorData
from posterity.model.density import Density
from posterity.model.joint import Joint


def checked(joint: Joint | Density, data: Data) -> Data:
    """The data, checked against the problem, with targets shaped for the likelihood; BadData where they do not fit."""
    if isinstance(joint, Density):
        if not isinstance(data, NoData):
            raise BadData("A Density has its data inside. Pass None as the data.")
        return data
    batch = joint.check(data.first())
    if data.num_data != joint.num_data:
        raise BadData(
            f"Joint.num_data is {joint.num_data} but the data have {data.num_data} rows, so the likelihood would be "
            f"scaled wrongly. Make the Joint with num_data={data.num_data}."
        )
    if isinstance(data, TensorData):
        return replace(data, rows=batch)
    if isinstance(data, (OwnOrders, Reordered)):
        return replace(data, data=replace(data.data, rows=batch))
    assert isinstance(data, StreamData)
    example = joint.example_output(batch)
    return data.prepared(lambda rows: joint.prepared(rows, example))
