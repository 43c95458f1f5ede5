"""launch/slurm.sh with stand-ins for SLURM's two commands: the ranks find each other by SLURM's variables."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
PYTHON = """#!/bin/bash
{ printf '%s\\0' "$@"; printf '\\0'; env -0; } > task-$RANK
cat said-$RANK
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


def start_job(folder: Path, *arguments: str | Path) -> tuple[subprocess.Popen, list[tuple[list[str], dict[str, str]]]]:
    """The batch script with two tasks, and of each its command and its environment. A task ends when something is
    written to said-{rank}, which it prints."""
    write_commands(folder / "bin", SRUN)
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    for rank in range(2):
        os.mkfifo(folder / f"said-{rank}")
        os.mkfifo(folder / f"task-{rank}")
    slurm = {"JOB_ID": "17", "JOB_NODELIST": "node[1-2]", "NTASKS": "2", "NTASKS_PER_NODE": "2", "CPUS_PER_TASK": "3"}
    job = subprocess.Popen(
        ["bash", ROOT / "launch" / "slurm.sh", *arguments],
        cwd=folder,
        env=os.environ
        | {f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    tasks = []
    for rank in range(2):
        command, environment = (folder / f"task-{rank}").read_text().split("\0\0")
        tasks.append((command.split("\0"), dict(line.split("=", 1) for line in environment.split("\0") if line)))
    return job, tasks


def test_the_batch_script_trains_on_two_tasks(config_file, tmp_path, fork):
    """The tasks' processes are forked with their imports done, in the place of Python's."""
    job, tasks = start_job(tmp_path, config_file, f"train.run_dir={tmp_path / 'run'}", "train.steps=5")
    ranks = [fork([str(ROOT / script), *arguments], given) for (script, *arguments), given in tasks]
    for number, rank in enumerate(ranks):
        (tmp_path / f"said-{number}").write_text(rank.communicate(timeout=200)[0])
    said = job.communicate(timeout=60)[0]
    assert [job.returncode, *(rank.returncode for rank in ranks)] == [0, 0, 0], said
    assert "on 2 CPU rank(s)" in said and "Trained: 5 steps" in said
    assert not (tmp_path / "requeued").exists()


def test_a_job_that_was_stopped_is_queued_again(tmp_path):
    job, _ = start_job(tmp_path, "run.yaml")
    for rank, said in enumerate(("Stopped after 2 of 5 steps\n", "")):
        (tmp_path / f"said-{rank}").write_text(said)
    job.communicate(timeout=60)
    assert job.returncode == 0 and (tmp_path / "requeued").read_text() == "requeue 17\n"
