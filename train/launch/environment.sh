# The environment of a training process on NVIDIA GPUs, for every launcher; source it. What a user
# has set already stays. Each line `export NAME` here is what mpirun.sh passes on to other hosts.

# XLA takes this part of each GPU's memory at the start, and nothing later: an allocation while
# kernels wait for each other could wait for ever. The rest is for the pools of jax_moe, which lie
# outside (their size is printed), for NCCL and for CUDA. To edit: lower it if a pool does not fit.
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-true}"
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.85}"

# Gradient sums over the data axis run beside the backward pass instead of after it. Not set on
# purpose: a scheduling mode of CUDA graphs. CONCURRENT would take the exchanges out of the graphs.
export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_enable_latency_hiding_scheduler=true}"

# A restart after a failure finds its programs compiled. Process 0 writes; a folder that all hosts
# see. To edit: where it lies.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/cache}"

# NCCL says why it failed, and nothing else.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# To edit, where NCCL takes the wrong network (it prints its choice with NCCL_DEBUG=INFO):
# export NCCL_SOCKET_IFNAME=eth0        the interface of the cluster's network, for set-up
# export NCCL_IB_HCA=mlx5_0,mlx5_1      the InfiniBand adapters next to the GPUs

# The last words of a process that is killed stand in its log.
export PYTHONUNBUFFERED=1
