"""One rank of a test of how ranks meet: it runs a rank's command. Started by the fixture `start_ranks`."""

import json
import sys

from longdraft.launch.train import main

sys.exit(main([sys.argv[1], *json.loads(sys.argv[2])]))
