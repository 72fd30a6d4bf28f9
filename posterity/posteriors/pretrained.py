"""Folders of posteriors in the manner of the Hugging Face hub: config.json, model.safetensors and a model card."""

import hashlib
import inspect
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from posterity.errors import BadFolder, PosterityError, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.network import Network
from posterity.posteriors.calibrated import Calibrated
from posterity.posteriors.load import posterior_of
from posterity.posteriors.posterior import Posterior
from posterity.priors.prior import Prior
from posterity.storage.disk import write_file
from posterity.storage.folder import FORMAT, LIBRARY
from posterity.storage.part import CONFIG, JSON, TENSORS, Part, json_bytes, pack, unpack
from posterity.storage.schema import reading

WEIGHTS, CARD = "model.safetensors", "README.md"
SEAL = "weights_sha256"  # a save that was interrupted leaves weights that are not those of the configuration
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIMIT = re.compile(r"\*\*Limit\*\*: (.*?)(?:\n\n|\Z)", re.DOTALL)


def write_pretrained(
    posterior: Posterior,
    path: str | os.PathLike[str],
    *,
    scores: Mapping[str, float],
    data: str,
    intended_use: str,
    limits: str,
) -> None:
    """Write the folder of `Posterior.save_pretrained`."""
    for name, score in scores.items():
        if not isinstance(score, (int, float)):
            raise TypeError(f"save_pretrained: scores must be numbers by name. Got {shown(score)} for {shown(name)}.")
    folder, (part,) = Path(path), posterior.parts().values()
    if folder.exists() and not folder.is_dir():
        raise BadFolder(f"'{folder}' is a file. Give a folder.")
    files = pack("posterior", part)
    weights = b"".join(files[TENSORS])
    config: dict[str, JSON] = {"library_name": LIBRARY, "format": FORMAT, "posterior": dict(part.config)}
    config[SEAL] = hashlib.sha256(weights).hexdigest()
    card = _card(posterior, folder.name, scores, data, intended_use, limits)
    write_file(folder / WEIGHTS, weights)
    write_file(folder / CONFIG, json_bytes(config))
    write_file(folder / CARD, card.encode())


def from_pretrained(
    name: str | os.PathLike[str],
    model: nn.Module | Network,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    revision: str | None = None,
) -> Posterior:
    """Read a posterior that `save_pretrained` wrote, from a local folder or from the hub by its id, as "owner/name".

    The module gives the architecture and the device; all numbers come from the folder, to the bit. A `likelihood` or
    `prior` of your own class is passed again, as to `load`. A folder on this computer comes before the hub, which needs
    huggingface_hub; `revision` is a branch, tag or commit there. Nothing in the folder is run.

    >>> import tempfile, torch, posterity as po
    >>> net = torch.nn.Linear(2, 1)
    >>> q = po.posteriors.Point.of(net, po.likelihoods.Gaussian(0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     q.save_pretrained(folder)
    ...     torch.equal(po.from_pretrained(folder, net).theta, q.theta)
    True
    """
    folder = _local(name, revision)
    where = f"Folder '{os.fspath(name)}'"
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise BadFolder(f"{where} has no {file}: it is not one that save_pretrained wrote. Name another.")
    with reading(where):
        stored = unpack(where, (folder / CONFIG).read_bytes(), folder / WEIGHTS)
        if stored.config["library_name"] != LIBRARY:
            raise BadFolder(f"It is for {shown(stored.config['library_name'])}. Load it with that library.")
        if stored.config["format"] != FORMAT:
            raise BadFolder(f"Its format is {shown(stored.config['format'])}, and this is {FORMAT}. Upgrade posterity.")
        if stored.config[SEAL] != hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest():
            raise BadFolder(f"Its {WEIGHTS} and {CONFIG} are not of the same save. Save it again.")
        config: Any = stored.config["posterior"]
        if not isinstance(config, dict):
            raise BadFolder(f"Its posterior must be an object. Got {shown(config)}. Save it again.")
    given = {"likelihood": likelihood, "prior": prior}
    return posterior_of(Part(config, stored.tensors), model, repr(os.fspath(name)), given=given)


def _local(name: str | os.PathLike[str], revision: str | None) -> Path:
    """Return the folder on this computer, downloaded where it is a hub's."""
    if Path(name).is_dir():
        return Path(name)
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        raise BadFolder(
            f"There is no folder '{os.fspath(name)}', and an id of the hub is like owner/name. Name another."
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise PosterityError(
            f"There is no folder '{name}' here, and the hub needs huggingface_hub. Install it with: "
            "pip install huggingface_hub."
        ) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, WEIGHTS, CARD]))
    except Exception as error:  # of huggingface_hub and of the network, whatever they are
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PosterityError(f"There is no folder '{name}' here, and the hub does not give it: {reason}") from error


def _card(
    posterior: Posterior, title: str, scores: Mapping[str, float], data: str, intended_use: str, limits: str
) -> str:
    """Return the model card: what is stored and what was given, and nothing else."""
    joint = posterior.joint
    kind = type(posterior.posterior if isinstance(posterior, Calibrated) else posterior)
    own = _LIMIT.search(inspect.cleandoc(kind.__doc__ or ""))
    of_kind = [f"`{kind.__name__}`: {' '.join(own[1].split())}"] if own else []
    table = ["| score | value |", "|---|---|", *(f"| {_cell(name)} | {_number(x)} |" for name, x in scores.items())]
    parts = [
        "---\nlibrary_name: posterity\ntags:\n- posterity\n- bayesian\n- uncertainty\n---",
        f"# {title}",
        "A distribution over the weights of a neural network, made and read by `posterity`.",
        f"## Method\n\n```\n{posterior!r}\n```",
        f"## Data\n\nThe posterior is of {joint.num_data:,} training rows. {data or 'They are not described.'}",
        "## Scores\n\n" + ("\n".join(table) if scores else "None were given."),
        f"## Intended use\n\n{intended_use or 'Not stated.'}",
        "## Limits\n\n" + ("\n\n".join([*of_kind, *[limits] * bool(limits)]) or "Not stated."),
        "## Use\n\nThe module `net` gives the architecture that is named above; its weights are replaced.\n\n"
        "```python\nimport posterity as po\n\n"
        f'q = po.from_pretrained("{title}", net)\npred = q.predict(x)\n```',
    ]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
