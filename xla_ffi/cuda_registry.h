// All groups that run on GPUs, by the key that compiled programs carry, and the thread that watches
// their reports.

#ifndef JAX_MOE_CUDA_REGISTRY_H_
#define JAX_MOE_CUDA_REGISTRY_H_

#include <cstdint>
#include <memory>

#include "cuda_group.h"
#include "status.h"

namespace jax_moe::cuda {

// Makes the group and starts the watch. A key that is known already is the same group: it gets the
// timeouts, and is rebuilt if it was closed or has failed.
Status RegisterGroup(int64_t key, Topology topology, const Timeouts& timeouts);

// Null if unknown.
std::shared_ptr<Group> FindGroup(int64_t key);

// Ends the watch; for the end of the process, before the driver goes.
void StopMonitor();

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_REGISTRY_H_
