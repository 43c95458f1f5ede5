"""One rank of a test: trains the runs it is told, one after the other. Started by the fixture `train_in_ranks`."""

import json
import sys

from longdraft.models.hf import load_target
from longdraft.train.config import load_config
from longdraft.train.engine import join_ranks, leave_ranks
from longdraft.train.loop import DTYPES, train

ranks = join_ranks()
for overrides in json.loads(sys.argv[2]):
    config = load_config(sys.argv[1], overrides)
    train(config, ranks, load_target(config.target.path, DTYPES[config.train.precision]))
leave_ranks(ranks)
