"""The device that a process of training runs on, settled before DeepSpeed is imported, which picks its own by then.

Not here: which GPU is a rank's (engine.py), what a device has to be able to do.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from longdraft.models.device import VISIBLE, check_device, default_device
from longdraft.train.typed import UNREADABLE, read_yaml

NAME = "train.device"


def settle_device(path: str | Path, overrides: Sequence[str]) -> str:
    """Sees to it that training runs where `train.device` of this config says; returns "cuda" or "cpu". For all stages
    of a config at once: the ranks are one group of processes.

    Raises: ValueError where the config cannot be read, where it asks for a GPU and there is none, and where it leaves
        the device open and there is a GPU that PyTorch cannot use.
    """
    raw = read_yaml(path, overrides)
    try:
        wanted = OmegaConf.select(raw, NAME, default="auto")
    except UNREADABLE:  # which is named with all the rest of the config
        wanted = "auto"
    if wanted == "cpu":
        os.environ[VISIBLE] = "-1"
        return "cpu"
    if wanted == "cuda":
        return check_device("cuda", NAME).type
    return default_device(NAME, f"set {NAME}=cpu").type
