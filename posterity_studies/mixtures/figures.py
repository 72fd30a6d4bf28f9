"""All figures of the study."""

from pathlib import Path

from posterity_studies.mixtures import figures_of_fits as fits
from posterity_studies.mixtures import figures_of_rounds as rounds
from posterity_studies.mixtures.study import Study


def draw(study: Study, folder: Path) -> list[str]:
    """Draw every figure of the study into the folder, and give the names of the files."""
    figures = {
        "points.png": rounds.points,
        "responsibilities.png": rounds.responsibilities,
        "bound.png": rounds.bound,
        "staircase.png": rounds.staircase,
        "labels.png": fits.labels,
        "clusters.png": fits.clusters,
        "priors.png": fits.priors,
    }
    for name, figure in figures.items():
        figure(study, folder / name)
    return list(figures)
