"""Habits of other packages: any logger for a run of `infer`, and callbacks for trainers of Hugging Face and Lightning.

Each callback leaves a posterior behind, `callback.posterior`. The other packages are imported when a callback is made;
nothing in the library imports this one.
"""

from posterity.integrations.huggingface import HuggingFaceIVON
from posterity.integrations.lightning import LightningIVON, LightningLaplace, LightningSWAG
from posterity.integrations.log import Log

__all__ = ["HuggingFaceIVON", "LightningIVON", "LightningLaplace", "LightningSWAG", "Log"]
