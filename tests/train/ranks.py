"""One rank of a test: performs a list of actions in order. Started by the fixture `start_ranks`.

{"train": [override, ...]} trains, with "until" to the checkpoint of that step, with another "config" where it is given.
{"copy": [from, to], "without": name} copies a run's folder without one checkpoint.
"""

import gc
import json
import shutil
import sys
from functools import lru_cache
from pathlib import Path

from longdraft.models.hf import load_target
from longdraft.models.target import Target
from longdraft.train.config import DTYPES
from longdraft.train.config_file import load_config
from longdraft.train.loop import train
from longdraft.train.ranks import join_ranks, leave_ranks
from longdraft.train.setup import open_target


@lru_cache(maxsize=2)
def target(path: str, precision: str) -> Target:
    return load_target(path, DTYPES[precision])


class Until(list):
    """It has something in it once a checkpoint is there."""

    def __init__(self, run_dir: str, step: int):
        super().__init__()
        self._checkpoint = Path(run_dir) / "checkpoints" / f"step_{step:06d}"

    def __bool__(self) -> bool:
        return self._checkpoint.exists()


ranks = join_ranks()
gc.freeze()  # DeepSpeed collects garbage at every start of a run; objects of the imports need not be searched
for action in json.loads(sys.argv[2]):
    if "train" in action:
        config = load_config(action.get("config", sys.argv[1]), action["train"])
        whole = config.target.zero_stage == 0 and config.target.loader == "longdraft"
        frozen = target(config.target.path, config.train.precision) if whole else open_target(config, ranks)
        train(config, ranks, frozen, Until(config.train.run_dir, action["until"]) if "until" in action else ())
    elif ranks.first:
        shutil.copytree(*action["copy"])
        shutil.rmtree(Path(action["copy"][1]) / "checkpoints" / action["without"])
    ranks.barrier()
leave_ranks(ranks)
gc.unfreeze()
