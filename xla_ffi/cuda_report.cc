#include "cuda_report.h"

#include <cstdio>

#include "cuda_device.h"

namespace jax_moe::cuda {

namespace {

std::string RankName(uint32_t rank, const Place& place) {
  if (rank == ABI_HOST_ABORT_RANK) return "the host";
  std::string name = "rank " + std::to_string(rank);
  const size_t device = rank / place.virtual_ranks;
  if (device >= place.ordinals.size()) return name;
  name += " (GPU " + std::to_string(place.ordinals[device]);
  if (!place.processes.empty()) name += " of process " + std::to_string(place.processes[device]);
  return name + ")";
}

std::string Seconds(uint64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", static_cast<double>(nanoseconds) * 1e-9);
  return text;
}

}  // namespace

// No streams here: their locale facets crash where another library of the process brings its own
// C++ runtime, as XLA's CUDA plugin does.
std::string Describe(const ptx::Record& record, const Place& place) {
  const std::string rank = RankName(record.rank, place);
  const std::string peer = RankName(record.peer, place);
  const std::string waited = rank + " waited " + Seconds(record.waited_ns) + " for ";
  const std::string values = " (expected " + std::to_string(record.expected) + ", saw " +
                             std::to_string(record.seen) + ")";
  const std::string part = std::to_string(record.index);
  std::string text = std::string("jax_moe_") + OperationName(static_cast<int>(record.operation)) +
                     " of " + place.group;
  if (place.num_instances > 1) text += " instance " + std::to_string(place.instance);
  switch (record.phase) {
    case ABI_PHASE_JOIN:
      return text + ", phase join: " + waited + peer + " to start the same call" + values +
             "; that rank is stuck or slow, or ran another program";
    case ABI_PHASE_ARRIVE:
      return text + ", phase arrive: " + waited + "part " + part + " of the data from " + peer +
             values +
             "; all ranks had joined, so that rank died or hung in the call, or its link failed";
    case ABI_PHASE_OVERLAP:
      return text + ", phase enter: " + rank + " found another call of the group running" + values +
             "; calls of one group must not run at the same time: keep them in one program and on "
             "one stream, or give each its own group";
    case ABI_PHASE_ABORTED:
      return text + ": " + rank + " gave up because " + peer + " had given up";
  }
  return text + ", phase " + std::to_string(record.phase) + ": " + waited + peer + ", part " +
         part + values;
}

}  // namespace jax_moe::cuda
