#!/usr/bin/env bash
# Trains `tiny` for some steps by train/launch/slurm.sh on a Slurm cluster of one node, this machine,
# which it sets up and takes down: tools/try_slurm.sh PYTHON [WORK_FOLDER]. Needs root, and Debian's
# packages slurm-wlm and munge (apt-get install --no-install-recommends slurm-wlm munge).
set -euo pipefail
python="$(realpath -s "$1")"
work="${2:-$(mktemp -d)}"
cd "$(dirname "$0")/.."
mkdir -p "$work/state" "$work/spool"
started=()

finish() {
  for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
}
trap finish EXIT

cat >"$work/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$(hostname)
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
CryptoType=crypto/munge
SlurmUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
NodeName=$(hostname) CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
CONF
export SLURM_CONF="$work/slurm.conf"

mungekey --create --keyfile="$work/munge.key"
munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.socket" \
  --pid-file="$work/munged.pid" --log-file="$work/munged.log" --seed-file="$work/munged.seed" &
started+=($!)
until test -S "$work/munge.socket"; do sleep 0.1; done
slurmctld -D &
started+=($!)
slurmd -D &
started+=($!)
until sinfo --noheader --states=idle | grep -q idle; do sleep 0.5; done

export PYTHON="$python" XLA_FLAGS=--xla_backend_optimization_level=0
sbatch --wait --nodes=1 --ntasks-per-node=2 --gpus-per-node=0 --cpus-per-task=1 \
  --output="$work/job.log" train/launch/slurm.sh tiny --steps 5 --print-every 1 \
  --run-dir "$work/run" --data.validation-windows 16 --mesh.cpu-devices 8 || { cat "$work/job.log"; exit 1; }
cat "$work/job.log"
