#include "cuda_report.h"

#include <cstdio>
#include <sstream>

#include "cuda_device.h"

namespace jax_moe::cuda {

namespace {

std::string RankName(uint32_t rank, const Place& place) {
  if (rank == ABI_HOST_ABORT_RANK) return "the host";
  std::string name = "rank " + std::to_string(rank);
  const size_t device = rank / place.virtual_ranks;
  if (device < place.ordinals.size()) {
    name += " (GPU " + std::to_string(place.ordinals[device]) + ")";
  }
  return name;
}

std::string Seconds(uint64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", static_cast<double>(nanoseconds) * 1e-9);
  return text;
}

}  // namespace

std::string Describe(const ptx::Record& record, const Place& place) {
  std::ostringstream out;
  out << "jax_moe_" << OperationName(static_cast<int>(record.operation)) << " of " << place.group;
  if (place.num_instances > 1) out << " instance " << place.instance;
  const std::string rank = RankName(record.rank, place);
  const std::string peer = RankName(record.peer, place);
  const auto values = [&] {
    out << " (expected " << record.expected << ", saw " << record.seen << ")";
  };
  switch (record.phase) {
    case ABI_PHASE_JOIN:
      out << ", phase join: " << rank << " waited " << Seconds(record.waited_ns) << " for " << peer
          << " to start the same call";
      values();
      out << "; that rank is stuck or slow, or ran another program";
      break;
    case ABI_PHASE_ARRIVE:
      out << ", phase arrive: " << rank << " waited " << Seconds(record.waited_ns) << " for part "
          << record.index << " of the data from " << peer;
      values();
      out << "; all ranks had joined, so that rank died or hung in the call, or its link failed";
      break;
    case ABI_PHASE_OVERLAP:
      out << ", phase enter: " << rank << " found another call of the group running";
      values();
      out << "; calls of one group must not run at the same time: keep them in one program and on "
             "one stream, or give each its own group";
      break;
    case ABI_PHASE_ABORTED:
      out << ": " << rank << " gave up because " << peer << " had given up";
      break;
    default:
      out << ", phase " << record.phase << ": " << rank << ", " << peer << ", part " << record.index
          << ", " << Seconds(record.waited_ns);
      values();
  }
  return out.str();
}

}  // namespace jax_moe::cuda
