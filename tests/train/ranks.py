"""One rank of a test: does what it is told, one thing after the other. Started by the fixture `start_ranks`.

{"train": [override, ...]} trains; {"copy": [from, to], "without": name} copies a run's folder, one checkpoint left out.
"""

import json
import shutil
import sys
from pathlib import Path

from longdraft.models.hf import load_target
from longdraft.train.config import load_config
from longdraft.train.engine import join_ranks, leave_ranks
from longdraft.train.loop import DTYPES, train

ranks = join_ranks()
for action in json.loads(sys.argv[2]):
    if "train" in action:
        config = load_config(sys.argv[1], action["train"])
        train(config, ranks, load_target(config.target.path, DTYPES[config.train.precision]))
    elif ranks.first:
        shutil.copytree(*action["copy"])
        shutil.rmtree(Path(action["copy"][1]) / "checkpoints" / action["without"])
    ranks.barrier()
leave_ranks(ranks)
