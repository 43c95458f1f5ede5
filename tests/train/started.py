"""One rank in a process that was forked with its imports done; the fixture `start_ranks` runs this by `runpy`.

Its globals say what to run: the script with its arguments, the environment, and a connection for what it prints.
"""

import atexit
import os
import runpy
import sys

given = globals()["given"]
os.environ.clear()
os.environ.update(given["environment"])
os.chdir(given["folder"])
for descriptor in (1, 2):
    os.dup2(given["says"].fileno(), descriptor)
given["says"].close()
sys.argv = [given["script"], *given["arguments"]]
try:
    runpy.run_path(given["script"], run_name="__main__")
finally:
    atexit._run_exitfuncs()  # multiprocessing exits without them
