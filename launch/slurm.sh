#!/bin/bash
# Train on several nodes under SLURM: sbatch launch/slurm.sh configs/longspec/llama3.1-8b.yaml [section.field=value ...]
#
# srun starts one task per GPU, without a launcher and without ssh between the nodes. Two minutes before the time limit
# SLURM sends SIGTERM, the ranks save and exit with 0, and the job requeues itself until training is done. The run's
# folder and the data must be on a file system that all nodes see.
# If a node's own name is 127.0.1.1 in its /etc/hosts, or there are several networks, export the interface between the
# nodes before sbatch: GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 (ip -br addr lists them).
#SBATCH --job-name=longdraft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# Keep Triton's compiled kernels on the node: homes are often on NFS, where all nodes would share one cache.
export MASTER_ADDR MASTER_PORT TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$(id -un)}"

# Since SLURM 22.05 srun does not inherit --cpus-per-task. A task is bound to its own processors, so it may use them all.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"

# Each task gets its rank from SLURM. The single quotes are deliberate: the variables are the task's, not this script's.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_SIZE=$SLURM_NTASKS_PER_NODE
    exec python launch/train.py "$@"
' task "$@" | tee "longdraft-$SLURM_JOB_ID.out"

if grep -q "^Stopped after" "longdraft-$SLURM_JOB_ID.out"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
