#!/bin/sh
# build.sh DIRECTORY: assembles the kernels and builds gpu_harness into DIRECTORY. Needs g++, ptxas and cuda.h.
# CUDA_INCLUDE names the folder of cuda.h, PTXAS the assembler; by default those beside nvcc.
set -eu
out=$1
here=$(cd "$(dirname "$0")" && pwd)
ptx=$here/../../ptx
mkdir -p "$out"
nvcc=$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")
ptxas=${PTXAS:-$(dirname "$nvcc")/ptxas}
include=${CUDA_INCLUDE:-$(dirname "$(dirname "$nvcc")")/include}
[ -f "$include/cuda.h" ] || include=/usr/local/cuda/include
for kernel in plan dispatch combine; do
    g++ -x assembler-with-cpp -E -P "$ptx/$kernel.ptx" -o "$out/$kernel.ptx"
    "$ptxas" -arch=sm_90 -warn-spills -warn-lmem-usage -Werror "$out/$kernel.ptx" -o "$out/$kernel.cubin"
done
pids=
for source in "$here"/*.cc; do
    g++ -std=c++17 -O2 -Wall -Wextra -Werror -I"$include" -c "$source" -o "$out/$(basename "$source" .cc).o" &
    pids="$pids $!"
done
for pid in $pids; do wait "$pid"; done
g++ "$out"/*.o -ldl -o "$out/gpu_harness"
