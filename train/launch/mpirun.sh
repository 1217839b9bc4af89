#!/usr/bin/env bash
# Open MPI: train/launch/mpirun.sh PROCESSES CONFIG [--key value ...], on the host of process 0 (JAX
# joins the processes at the host of mpirun). One process per GPU. Open MPI 5 needs the Python
# package mpi4py, Open MPI 4 does not.
#
# To edit, in the environment: MPIRUN_FLAGS, as "--host one:8,two:8" for two hosts of 8 GPUs, or
# "--oversubscribe" for more processes than cores; PYTHON if it is not on PATH.
set -euo pipefail
folder="$(dirname "${BASH_SOURCE[0]}")"
source "$folder/environment.sh"
export JAX_NUM_PROCESSES="$1"  # so many must join, else an error
shift
# Containers run as root, which mpirun refuses otherwise.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

passed_on=(-x JAX_NUM_PROCESSES -x PATH)
while read -r name; do
  passed_on+=(-x "$name")
done < <(sed -n 's/^export \([A-Z_]*\)=.*/\1/p' "$folder/environment.sh")

# XLA has threads of its own for all cores: a process must not be bound to one.
# shellcheck disable=SC2086
exec mpirun -n "$JAX_NUM_PROCESSES" --bind-to none ${MPIRUN_FLAGS:-} "${passed_on[@]}" \
  "${PYTHON:-python}" -m train "$@"
