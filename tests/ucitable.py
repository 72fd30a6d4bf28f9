"""A small table under the name of a real UCI set: 40 rows, 3 inputs of which one is constant, 3 splits."""

import hashlib

import torch

from posterity.datasets import uci

HEADER = "dataset,method,metric,mean,std_err,spread_as_reported,source,provenance,notes\n"
GOAL = '"MC dropout, 1 hidden layer, grid search 2018 (MC average)"'
PUBLISHED = (
    HEADER
    + f"energy,{GOAL},test_rmse,0.54,0.01,0.06,paper,read,none\n"
    + f"energy,{GOAL},test_ll,-1.25,0.02,0.06,paper,read,none\n"
    + 'energy,"Deep ensembles (M=5, 40 epochs, 1x50 ReLU; 1x100 for protein)",test_nll,1.38,,0.2,paper,read,none\n'
    + "energy,Another,test_rmse,3,,,paper,read,none\n"
    + "energy,Another,coverage,0.9,,,paper,read,none\n"
    + "mnist,Another,test_nll,0.1,,,paper,read,none\n"
)
REFUSED = [  # of what the studies of UCI tables have in common
    (("--datasets", "enrgy"), "Unknown dataset 'enrgy'. Did you mean 'energy'?"),
    (("--methods", "laplas"), "Unknown method 'laplas'. Did you mean 'laplace'?"),
    (("--methods", ","), "--methods must name at least one. Got none."),
    (("--splits", "0"), "splits must be a positive whole number. Got 0."),
    (("--jobs", "0"), "jobs must be a positive whole number. Got 0."),
    (("--steps", "0"), "steps must be a positive whole number. Got 0."),
]


def write_energy(root, monkeypatch, published=PUBLISHED):
    """Make `root` the folder of data sets, with the table as `energy` and, unless None, published results."""
    folder = root / "uci" / "energy" / "data"
    folder.mkdir(parents=True)
    noise = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 2, generator=noise, dtype=torch.float64)
    targets = 20 + 5 * inputs[:, :1] + torch.randn(40, 1, generator=noise, dtype=torch.float64)
    table = torch.cat([inputs, torch.full((40, 1), 0.1, dtype=torch.float64), targets], dim=1)
    data = "\n".join(" ".join(map(repr, row)) for row in table.tolist()).encode()
    files = {"data.txt": data, "index_features.txt": b"0\n1\n2\n", "index_target.txt": b"3\n"}
    for split in range(3):
        test = set(range(4 * split, 4 * split + 4))
        files[f"index_test_{split}.txt"] = "\n".join(map(str, sorted(test))).encode()
        files[f"index_train_{split}.txt"] = "\n".join(str(row) for row in range(40) if row not in test).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if published is not None:
        (root / "published_results.csv").write_text(published)
    monkeypatch.setitem(uci._REGRESSION, "energy", uci._Regression(40, 3, 3, hashlib.sha256(data).hexdigest()))
    monkeypatch.setenv("POSTERITY_DATA", str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
