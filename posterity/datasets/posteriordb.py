"""Posteriors of posteriordb with their reference draws."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.datasets.files import HOST, check_sum, content, data_folder, root_folder
from posterity.errors import BadData, unknown

# SHA-256 of the reference draws of each posterior in posteriordb.
_DRAWS_SUMS = {
    "sblrc-blr": "44f876cf35a038fcd1fd13fb19bbadf04b4308618ad41390050ae8b014a4592d",
    "sblri-blr": "4e1f20dc9ccc45e1b05d0b67ee83b9a2ffdd21c90ca576549571940b5c4369e8",
    "kidiq-kidscore_momiq": "ee5deb23bf2dad804393c682b308da720825f9b099c37d774526c3a5a590e8d7",
    "kidiq-kidscore_interaction": "acac3c394dfeb65ced6f14ddf20b5a5c075d7a80ae663d1d71f904c16d207065",
    "nes2000-nes": "1b62971bd0ee49024afd2e77a3e0e2a10729a6b0ecf5d801f51233481b48cd74",
    "diamonds-diamonds": "2745f4857ceb358ff6c692ba1dd1fd9d01cf8bc5ac456ae87e3c957fd51c4aae",
    "arK-arK": "7ddb947e6c1ac5380f9c1e1fa101833a1236ef03de30f2cf5ece7b5b71841530",
    "eight_schools-eight_schools_noncentered": "0858641e630c877103dba2b78beaf6bc1f39435fc43d2894c4dff5d609c7a264",
    "low_dim_gauss_mix-low_dim_gauss_mix": "422de750b20aef29c7b86f6bfa88dd9759050b6ffeb3588c004d6a4861c1e776",
    "gp_pois_regr-gp_regr": "df89f5011d9518b06c95a631c258ce03f4818b78deb40ed069cfd1d70074c8bb",
}
# File and SHA-256 of the reference draws of each posterior.
_DRAWS = {name: (f"reference_draws/{name}.json.zip", digest) for name, digest in _DRAWS_SUMS.items()}
# Not part of posteriordb: 10,000 draws by importance sampling, with the error of independent draws.
_DRAWS["nes_logit_data-nes_logit_model"] = (
    "computed_reference/nes_logit_data-nes_logit_model.json.zip",
    "d1fd4e63e02a3e31945287d09db3fd6cc195ddbb24b80219e6808ffb5857bdba",
)

# SHA-256 of the file of each data set.
_DATA = {
    "sblrc": "81990278b8762ac79244afcd470861560c7b28e34e411ce6da814e6f632a1b81",
    "sblri": "e975f6641b5e08d65cb1e3519f1d0370939afbc82bfbeb3c1f5a07e5bbd717a7",
    "kidiq": "16d341a99ec8178231eab660d8fda084a44145f6a241daf35276d0192d13b92d",
    "nes2000": "4170d5780771b54b763315b5c21772befd4ca208c62d23424535f4b4af347439",
    "diamonds": "127d44a642f954b707bec2d82725e168d57a412d59487708794d4a17097f26ba",
    "arK": "6f2acbacb04655927bfc9173c42e51fc330bf08c6184242a62b7e39c22abe410",
    "eight_schools": "8e37cc01fe05b0e1779255e9bd386261f3d61daf7f75f02f72f38cdc9750531c",
    "low_dim_gauss_mix": "9b5ea284321417a7816b0426a0c96788a6824e6ceb4ec4ecd89493779720b8f9",
    "gp_pois_regr": "9aaaa9d5694b74e2aefa6d0bd2f0a48637fcb4d455a74b33985e58154f285da9",
    "nes_logit_data": "76af25eb4b46c1aa35c2e6c8c98810148d3de1042266336721494ee5f083d06e",
    "mnist_100": "b97ac7132c297b47a4976dd5324674de1d57cbc13a259c6390d20c4604c5d37e",
}

POSTERIORS = tuple(_DRAWS)
"""The names that `posteriordb_draws` knows."""


def posteriordb_data(name: str, root: str | Path | None = None) -> dict[str, Tensor]:
    """Return the data set `name` of posteriordb, or the data of the posterior `name`: tensors by name, in float64.

    `root` is the folder of posteriordb, by default `data_folder("posteriordb")`. The file is checked against its
    SHA-256.
    """
    data = name.split("-")[0]
    if data not in _DATA:
        raise ValueError(unknown("data set of posteriordb", data, _DATA))
    folder = root_folder("posteriordb", root, "data", "posteriordb-data") if root is None else Path(root) / "data"
    entries = _unpacked(folder / f"{data}.json.zip", _DATA[data], data)
    return {key: torch.tensor(value, dtype=torch.float64, device=HOST) for key, value in entries.items()}


def posteriordb_draws(name: str, root: str | Path | None = None) -> dict[str, Tensor]:
    """Return the reference draws of a posterior: each parameter (10, 1000), or (10, 1000, K) where it has K entries.

    `root` and the check are as in `posteriordb_data`. Entries "beta[1]", "beta[2]" ... of the file are "beta" here.
    """
    if name not in _DRAWS:
        raise ValueError(unknown("posterior", name, _DRAWS))
    file, wanted = _DRAWS[name]
    folder, own = file.split("/")
    if root is None and folder == "computed_reference" and not (data_folder("posteriordb") / file).is_file():
        raise BadData(
            f"The draws of '{name}' are not part of posteriordb and are published nowhere: put {own} into "
            f"{data_folder('posteriordb') / folder}, or leave this posterior out."
        )
    below = root_folder("posteriordb", None, folder, "posteriordb-draws") if root is None else Path(root) / folder
    chains = _unpacked(below / own, wanted, name)
    entries: dict[str, list[Tensor]] = {}
    for entry in chains[0]:
        draws = torch.tensor([chain[entry] for chain in chains], dtype=torch.float64, device=HOST)  # (10, 1000)
        entries.setdefault(entry.split("[")[0], []).append(draws)
    several = {entry.split("[")[0] for entry in chains[0] if "[" in entry}
    return {key: torch.stack(parts, -1) if key in several else parts[0] for key, parts in entries.items()}


def _unpacked(path: Path, wanted: str, name: str) -> Any:
    """Return the JSON in the single file of a zip archive."""
    packed = content(path)
    check_sum(packed, wanted, path, name)
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            return json.loads(archive.read(archive.namelist()[0]))
    except (zipfile.BadZipFile, IndexError, ValueError) as error:
        raise BadData(f"{path}: it must be a zip archive with one JSON file. {error}. Fetch the file again.") from error


FILE = "reference_posterior.json"
_SUM = "afa0347a47cf16d38e5f96477877cca7900cec864a331fff5ba3c01be74f50cc"


class ReferenceMoments(NamedTuple):
    """Means (K,) of a posterior, their standard errors, and the standard deviations."""

    mean: Tensor
    mean_error: Tensor
    sd: Tensor


def german_credit_reference(root: str | Path | None = None) -> ReferenceMoments:
    """Return moments of the 24 weights and the bias (25,), from the inference gym of TensorFlow Probability.

    Inputs are standardised over all 1000 rows (population standard deviation), bad is class 1, and weights and bias
    have N(0, 1) priors. `root` is the folder of the file, which is checked against its SHA-256; by default
    "german-credit" in `data_folder("uci-classification")`.
    """
    path = root_folder("uci-classification", root, "german-credit", "german-credit --from FOLDER") / FILE
    if root is None and not path.is_file():
        raise BadData(
            f"{path}: there is no such file, and it is published nowhere in this form. Put the moments there that the "
            "inference gym of TensorFlow Probability has, or leave German credit out."
        )
    data = content(path)
    check_sum(data, _SUM, path, "german-credit")
    stored = json.loads(data)["logistic"]
    return ReferenceMoments(
        *(torch.tensor(stored[key], dtype=torch.float64, device=HOST) for key in ("mean", "mean_standard_error", "sd"))
    )
