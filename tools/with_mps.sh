#!/usr/bin/env bash
# with_mps.sh COMMAND...: runs it under a daemon of MPS of its own, which lets several processes use one GPU at a time.
# The daemon has folders of its own and ends with the command, whatever happens; what it said goes to $MPS_LOG, if set.
set -uo pipefail
export PATH="$PATH:/usr/local/nvidia/bin"
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
setsid nvidia-cuda-mps-control -f </dev/null >"$folder/log/daemon.log" 2>&1 & # with its servers a process group
daemon=$!

control() { timeout 3 nvidia-cuda-mps-control <<<"$1" >>"$folder/log/daemon.log" 2>&1; }
stop() {
  control quit
  kill -KILL -- "-$daemon" 2>/dev/null
  wait "$daemon" 2>/dev/null
  [[ -z ${MPS_LOG:-} ]] || cat "$folder"/log/*.log >>"$MPS_LOG"
  rm -rf "$folder"
}
trap stop EXIT

for attempt in {1..30}; do
  control get_server_list && break
  if [[ $attempt == 30 ]]; then
    echo "with_mps.sh: nvidia-cuda-mps-control does not start:"
    tail -n 3 "$folder/log/daemon.log"
    exit 1
  fi
  sleep 0.1
done
"$@"
