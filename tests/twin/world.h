// Ranks, their pools and their buffers, and calls whose results are known.
#ifndef JAX_MOE_TESTS_TWIN_WORLD_H_
#define JAX_MOE_TESTS_TWIN_WORLD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "../gpu_harness/oracle.h"
#include "kernel.h"

namespace twin {

// One call of each operation and what must come of it, stacked over ranks.
struct Call {
  harness::Sizes sizes;
  uint32_t chunk_tokens, link_blocks;
  std::vector<int32_t> ids_in;
  harness::PlanArrays plan;
  std::vector<uint8_t> x, rows, y;
  std::vector<float> s, row_s, s_out;
};
Call DrawCall(uint32_t ranks, uint64_t seed);

// One rank's buffers for one call, outputs poisoned.
struct Buffers {
  std::vector<int32_t> ids_in, expert_ids, positions, sources, arrivals, group_sizes,
      padded_group_sizes, dropped, invalid;
  std::vector<uint8_t> x, rows, y;
  std::vector<float> s, row_s, s_out;
};

class World {
 public:
  explicit World(uint32_t ranks, Mutant mutant);
  // Pools zero but for epochs and flags, reports zero but for the time-outs.
  void Rebuild(uint64_t epoch, uint64_t timeout_ns);
  Launch MakeLaunch(uint32_t rank, int operation, const Call& call, Buffers& buffers);
  // Runs plan, dispatch and combine of one call on one rank; empty, or what is wrong.
  std::string RunCall(uint32_t rank, const Call& call);
  uint32_t ranks() const { return ranks_; }
  Address pool(uint32_t rank) { return reinterpret_cast<Address>(pools_[rank].data()); }
  jax_moe::ptx::Record record(uint32_t rank) const;

 private:
  uint32_t ranks_;
  Mutant mutant_;
  jax_moe::ptx::PoolLayout layout_;
  std::vector<std::vector<uint64_t>> pools_, reports_;
};

Buffers MakeBuffers(const Call& call, uint32_t rank);
// Empty, or the first array of the rank that differs from the specification's.
std::string Compare(const Call& call, uint32_t rank, const Buffers& buffers);

}  // namespace twin

#endif  // JAX_MOE_TESTS_TWIN_WORLD_H_
