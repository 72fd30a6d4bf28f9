"""Folders of files of rows, as tests of shards need them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import feather, parquet
from torch import Tensor

COLUMNS = ("a", "b", "c")


def rows(count: int = 100, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs (N, 3), whose first column is the row number, and targets (N,), on the CPU as all that files hold."""
    generator = torch.Generator("cpu").manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, device="cpu")
    inputs[:, 0] = torch.arange(count, device="cpu")
    return inputs, torch.randn(count, generator=generator, device="cpu")


def table(inputs: Tensor, targets: Tensor, **more: object) -> pa.Table:
    columns = {name: inputs[:, place].numpy() for place, name in enumerate(COLUMNS)}
    return pa.table({**columns, "y": targets.numpy(), **more})


def write(folder: Path, kind: str, inputs: Tensor, targets: Tensor, each: int = 37, part: int = 10) -> Path:
    """Write files of `each` rows in parts of `part`; arrays go to files x*.npy and y*.npy in folders of their own."""
    folder.mkdir(exist_ok=True)
    for number, low in enumerate(range(0, len(inputs), each)):
        own = inputs[low : low + each], targets[low : low + each]
        if kind == "parquet":
            parquet.write_table(table(*own), folder / f"{number}.parquet", row_group_size=part)
        elif kind == "arrow":
            feather.write_feather(table(*own), folder / f"{number}.arrow", chunksize=part, compression="lz4")
        else:
            for name, tensor in zip("xy", own, strict=True):
                (folder / name).mkdir(exist_ok=True)
                np.save(folder / name / f"{number}.npy", tensor.numpy())
    return folder
