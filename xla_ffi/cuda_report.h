// Words for what a kernel wrote into a group's report.

#ifndef JAX_MOE_CUDA_REPORT_H_
#define JAX_MOE_CUDA_REPORT_H_

#include <string>
#include <vector>

#include "ptx/params.h"

namespace jax_moe::cuda {

// Where a rank lives, for messages.
struct Place {
  std::string group;  // the group's description
  int instance = 0;
  int num_instances = 1;
  std::vector<int> ordinals;  // CUDA ordinals of the instance's devices
  uint32_t virtual_ranks = 1;
  std::vector<int> processes = {};  // which have these devices; empty if there is only one
};

// Operation, phase, waiting rank, missing rank, expected and seen value, seconds waited; then what
// it may come from.
std::string Describe(const ptx::Record& record, const Place& place);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_REPORT_H_
