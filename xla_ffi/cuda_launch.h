// What one call asks for, the limits on it, and the shape of its launch.

#ifndef JAX_MOE_CUDA_LAUNCH_H_
#define JAX_MOE_CUDA_LAUNCH_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_device.h"
#include "ptx/params.h"
#include "status.h"

namespace jax_moe::cuda {

constexpr int kNumArrays = 12;

struct Call {
  int operation = ABI_OPERATION_PLAN;
  ptx::CallShape shape{};  // first_rank is left to the group
  int64_t num_sms = 0;     // SMs to use; 0 for all
  int64_t link_sms = 0;    // SMs of these that push to other ranks; 0 for the default
};

// Which limit of the kernels the call exceeds, by how much, and what to do; ok if none.
Status CheckLimits(const Call& call);

struct LaunchShape {
  KernelShape kernel;
  uint32_t blocks_per_rank;
  uint32_t link_blocks;
  uint32_t chunk_tokens;
};
// The same on every device of the group: `devices` are all of one instance, null where another
// process has it (such GPUs are alike). Processes that share a GPU get an equal part of its SMs, so
// that their kernels can run side by side.
Status ChooseLaunch(const std::vector<Device*>& devices, const Call& call, LaunchShape* shape,
                    uint32_t processes_per_gpu = 1);

// Launches the call's kernel on the stream, and does nothing else.
Status LaunchKernel(const Device& device, int operation, uint32_t virtual_ranks,
                    const LaunchShape& shape, ptx::Params params, Stream stream);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_LAUNCH_H_
