"""One rank of a test of decoding while training: trains runs one after the other, each with a target that it opens
itself. Started by the fixture `start_ranks`; an action is a list of overrides."""

import json
import sys

from longdraft.train.config_file import load_config
from longdraft.train.loop import train
from longdraft.train.ranks import join_ranks, leave_ranks

ranks = join_ranks()
for overrides in json.loads(sys.argv[2]):
    train(load_config(sys.argv[1], overrides), ranks)
    ranks.barrier()
leave_ranks(ranks)
