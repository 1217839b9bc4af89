// What the harness can do; each ends the program at the first thing that is wrong.
#ifndef JAX_MOE_TESTS_GPU_HARNESS_RUN_H_
#define JAX_MOE_TESTS_GPU_HARNESS_RUN_H_

#include <string>
#include <vector>

#include "group.h"

namespace harness {

// Uploads one case's operands for one device.
void UploadOperands(const Group& group, size_t device, const Case& test, const Expected& expected,
                    const Arrays& arrays);
// Enqueues plan, dispatch and combine on every device, outputs poisoned before.
void LaunchAll(const Group& group, const Sizes& sizes, const std::vector<Arrays>& arrays,
               const Tuning& tuning);
// Compares every output of every device with the oracle, byte for byte, and looks at the guard
// bands.
void CheckOutputs(const Group& group, const Case& test, const Expected& expected,
                  const std::vector<Arrays>& arrays);

// All cases at `virtual_ranks` ranks a device and several launch shapes.
void RunCheck(const std::vector<Device>& devices, uint32_t virtual_ranks);
// `steps` calls of alternating shapes and routings, from an epoch a little before 2^64.
void RunSoak(const std::vector<Device>& devices, uint32_t virtual_ranks, uint32_t steps);
// Absent, silent and overlapping ranks, host abort, and the group's life after it.
void RunDeadline(const std::vector<Device>& devices);
// Graph replays of each operation against the device's own copy. `tokens` a rank, V3 sizes.
void RunTime(const std::vector<Device>& devices, uint32_t virtual_ranks, uint32_t tokens,
             const Tuning& tuning);

}  // namespace harness

#endif  // JAX_MOE_TESTS_GPU_HARNESS_RUN_H_
