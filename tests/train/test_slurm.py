"""launch/slurm.sh with stand-ins for SLURM's two commands: the ranks find each other by what its variables say."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
SCONTROL = """#!/bin/bash
if [ "$1" == show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi
"""


def test_the_batch_script_trains_on_two_tasks(config_file, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    slurm = {"JOB_ID": "17", "JOB_NODELIST": "node[1-2]", "NTASKS": "2", "NTASKS_PER_NODE": "2"}
    result = subprocess.run(
        [
            "bash",
            str(ROOT / "launch" / "slurm.sh"),
            str(config_file),
            f"train.run_dir={tmp_path / 'run'}",
            "train.steps=5",
        ],
        cwd=tmp_path,
        env=os.environ
        | {f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert "on 2 CPU rank(s)" in result.stdout and "Trained: 5 steps" in result.stdout
    assert not (tmp_path / "requeued").exists()
