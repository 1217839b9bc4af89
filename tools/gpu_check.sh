#!/usr/bin/env bash
# gpu_check.sh [SECTION...]: builds on a machine with GPUs, runs the GPU tests within time limits, and sums up.
# Sections in order: build smoke exchange groups faults graphs matmul layer soak processes suite beside trainer mps
# mps_suite mps_beside mps_trainer mps_deepep mps_kill sanitizers pair; by default those up to processes. PYTHON names
# the interpreter, with jax[cuda13], pytest, scikit-build-core and nanobind; the trainer needs the extra "train" too,
# DeepEP torch and tokenspeed_deepep. The default takes about 8 minutes on one H200. Nothing can hang beyond its limit:
# each kernel has its deadline, each section its own.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$(dirname "${PYTHON:=python3}"):$PATH" PYTHONUNBUFFERED=1 JAX_MOE_REQUIRE=gpu1
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.4}"
logs=${OUT:-build/gpu_check}
mkdir -p "$logs"
summary=

# section NAME SECONDS COMMAND...
section() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  [[ " $wanted " == *" $name "* ]] || return 0
  echo "==> $name"
  timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1 || status=$?
  tail -n "${TAIL:-15}" "$logs/$name.log"
  summary+=$(printf '%-11s %-4s %4d s  %s' "$name" "$([[ $status == 0 ]] && echo ok || echo "$status")" \
    $((SECONDS - start)) "$(grep -aE '^(=* ?[0-9]+ (passed|failed)|.* (passed|failed).* in )' "$logs/$name.log" | tail -n1)")$'\n'
  return $status
}
tests() { "$PYTHON" -P -m pytest -q -p no:cacheprovider -p no:randomly "$@"; }
export -f tests
export PYTHON

wanted=${*:-build smoke exchange graphs groups faults matmul layer soak processes}
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader || exit 1
gpu=tests/gpu/test_gpu
section build 240 "$PYTHON" -m pip install --no-build-isolation --no-deps --disable-pip-version-check -v -e . || wanted=
section smoke 120 bash -c 'tests -x "$@"' tests ${gpu}_runtime.py "${gpu}_exchange.py::test_every_bit[one_rank]" \
  "${gpu}_exchange.py::test_every_bit[virtual8_nodes_2]" || wanted=
section exchange 240 bash -c 'tests --maxfail=8 "$@"' tests ${gpu}_exchange.py
section groups 90 bash -c 'tests "$@"' tests ${gpu}_groups.py
section faults 60 bash -c 'tests "$@"' tests ${gpu}_faults.py
section graphs 180 bash -c 'tests -s "$@"' tests ${gpu}_graphs.py
section matmul 240 bash -c 'tests "$@"' tests ${gpu}_matmul.py
section layer 90 bash -c 'tests "$@"' tests ${gpu}_layer.py
section soak 120 bash -c 'tests "$@"' tests ${gpu}_soak.py
# Stops and kills processes of its own; their logs lie in processes/, beside the section's.
section processes 150 env JAX_MOE_PROCESS_LOGS="$logs/processes" bash -c 'tests "$@"' tests ${gpu}_processes.py
suite=${gpu}_process_suite.py
section suite 460 env JAX_MOE_PROCESS_LOGS="$logs/processes" bash -c 'tests "$@"' tests $suite -k "not beside"
section beside 160 env JAX_MOE_PROCESS_LOGS="$logs/processes" bash -c 'tests "$@"' tests $suite -k beside
section trainer 460 bash -c 'tests "$@"' tests ${gpu}_trainer.py
# Again on one GPU under MPS. What kills a process is left out, or comes last: it can take the server with it.
mps=(env MPS_LOG="$logs/mps_daemon.log" JAX_MOE_PROCESS_LOGS="$logs/mps" tools/with_mps.sh)
section mps 150 env JAX_MOE_KILLS=0 "${mps[@]}" bash -c 'tests "$@"' tests ${gpu}_processes.py -k "one_gpu and not survivor"
section mps_suite 250 "${mps[@]}" bash -c 'tests "$@"' tests $suite -k "one_gpu and not beside"
section mps_beside 100 "${mps[@]}" bash -c 'tests "$@"' tests $suite -k beside_on_one_gpu
section mps_trainer 320 "${mps[@]}" bash -c 'tests "$@"' tests ${gpu}_trainer.py -k one_gpu
section mps_deepep 400 "${mps[@]}" "$PYTHON" -m jax_moe.bench --shape deepseek-v3 --devices 1 --virtual-ranks 2 \
  --share-gpus --routing balanced --dtype bfloat16 --measures plan+dispatch,combine,plan+dispatch+combine \
  --columns ptx,deepep:20,deepep:24 --seconds 20
section mps_kill 150 "${mps[@]}" bash -c 'tests "$@"' tests ${gpu}_processes.py -k "one_gpu and survivor"
section sanitizers 400 env SHARD=sanitizers bash -c 'tests -s "$@"' tests ${gpu}_sanitizers.py
section pair 120 env JAX_MOE_REQUIRE=gpu2 bash -c 'tests "$@"' tests ${gpu}_pair.py
echo "==> summary"
printf '%s' "$summary"
[[ -n $wanted ]] && ! grep -qvE '^[a-z_]+ +ok ' <<<"${summary%$'\n'}"
