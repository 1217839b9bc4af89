// Where the processes of a group meet, for what they must do together: sharing pools, closing,
// rebuilding.

#ifndef JAX_MOE_CUDA_MEETING_H_
#define JAX_MOE_CUDA_MEETING_H_

#include <string>
#include <vector>

#include "status.h"

namespace jax_moe::cuda {

class Meeting {
 public:
  virtual ~Meeting() = default;
  // Hands in this process's message for a phase and waits for everybody's, own included, in the
  // order of the group's processes. Fails by name when one does not come in time.
  virtual Status Gather(const std::string& phase, const std::string& mine,
                        std::vector<std::string>* all) = 0;
};

// Gathers a message, or what went wrong instead of it: so either all processes go on, with
// everybody's messages, or all fail with an error of their own or of the first that has one.
// `processes` are the numbers of the group's processes.
Status Agree(Meeting& meeting, const std::vector<int>& processes, const std::string& phase,
             const Status& status, const std::string& mine, std::vector<std::string>* all);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_MEETING_H_
