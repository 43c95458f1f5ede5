"""launch/slurm.sh with stand-ins for SLURM's two commands: the ranks find each other by SLURM's variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
SCONTROL = """#!/bin/bash
if [ "$1" == show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi
"""


def write_commands(folder: Path, srun: str) -> None:
    folder.mkdir()
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(("given", "threads"), [({}, 3), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_a_task_has_the_processors_that_the_job_asked_for(tmp_path, given, threads):
    write_commands(tmp_path / "bin", '#!/bin/bash\necho "$1 $2, $OMP_NUM_THREADS threads"\n')
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_PER_TASK": "3"}
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = others | slurm | given | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    said = subprocess.run(["bash", ROOT / "launch" / "slurm.sh"], cwd=tmp_path, env=environment, capture_output=True)
    assert said.stdout.decode() == f"--kill-on-bad-exit=1 --cpus-per-task=3, {threads} threads\n", said.stderr


def test_the_batch_script_trains_on_two_tasks(config_file, tmp_path):
    commands = tmp_path / "bin"
    write_commands(commands, SRUN)
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    slurm = {"JOB_ID": "17", "JOB_NODELIST": "node[1-2]", "NTASKS": "2", "NTASKS_PER_NODE": "2", "CPUS_PER_TASK": "3"}
    command = ["bash", ROOT / "launch" / "slurm.sh", config_file, f"train.run_dir={tmp_path / 'run'}", "train.steps=5"]
    result = subprocess.run(
        command,
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
