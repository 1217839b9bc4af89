#!/usr/bin/env bash
# Slurm: sbatch train/launch/slurm.sh CONFIG [--key value ...], from the repository's folder.
# One process per GPU. JAX finds process 0 by Slurm's variables; jobs of one host work too.
#
# To edit: nodes, tasks and GPUs per node (equal), CPUs per task, time; PYTHON if it is not on PATH.
#SBATCH --job-name=jax_moe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Two minutes before the time is up: save and stop. The same sbatch goes on from there.
#SBATCH --signal=TERM@120
# No --gpus-per-task: each process must see all GPUs of its host, and JAX takes the one that has
# the process's local number.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
source train/launch/environment.sh
# So many must join; without it processes that detect no launcher would each train alone.
export JAX_NUM_PROCESSES="$SLURM_NTASKS"
# The trainer's own watchers end a run in which a process died; --kill-on-bad-exit ends it for sure.
exec srun --label --kill-on-bad-exit=1 "${PYTHON:-python}" -m train "$@"
