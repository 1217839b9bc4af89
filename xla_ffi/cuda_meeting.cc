#include "cuda_meeting.h"

namespace jax_moe::cuda {

// A message begins with the status code, so that an error keeps its kind on the way.
Status Agree(Meeting& meeting, const std::vector<int>& processes, const std::string& phase,
             const Status& status, const std::string& mine, std::vector<std::string>* all) {
  const std::string head(1, static_cast<char>(status.code));
  const Status met = meeting.Gather(phase, head + (status.ok() ? mine : status.message), all);
  if (!status.ok()) return status;
  if (!met.ok()) return met;
  for (size_t i = 0; i < all->size(); ++i) {
    std::string& message = (*all)[i];
    if (message.empty()) return {StatusCode::kInternal, "an empty message in phase " + phase};
    const auto code = static_cast<StatusCode>(message[0]);
    message.erase(0, 1);
    if (code != StatusCode::kOk) {
      return {code, "process " + std::to_string(processes[i]) + ": " + message};
    }
  }
  return {};
}

}  // namespace jax_moe::cuda
