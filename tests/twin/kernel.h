// One launch of a kernel on one rank: blocks of warps, each warp a thread; entering, waiting,
// claiming, leaving.
#ifndef JAX_MOE_TESTS_TWIN_KERNEL_H_
#define JAX_MOE_TESTS_TWIN_KERNEL_H_

#include <barrier>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../../ptx/params.h"
#include "memory.h"

namespace twin {

using jax_moe::ptx::Params;

// Deliberate faults, each of which a run must notice.
enum class Mutant { kNone, kOneHalf, kFlagBeforeWrites, kFlagRelaxed, kRingReuse };

constexpr uint32_t kBlocks = 2;
constexpr uint32_t kWarps = 3;

// What a launch reads and writes besides pools; device pointers of Params::arrays, one rank's each.
struct Launch {
  Params params;
  uint32_t rank;
  int operation;
  Mutant mutant;
  std::vector<Address> pools;
  Address report;

  Address pool() const { return pools[rank]; }
  template <typename T>
  T* array(int offset) const {
    return reinterpret_cast<T*>(params.arrays[jax_moe::ptx::ArraySlot(offset)]);
  }
};

// One block's meeting place.
struct Block {
  std::barrier<> barrier{kWarps};
  bool votes[kWarps] = {};
  std::vector<uint8_t> shared;  // plan's tallies and tables
};

// One warp: a thread. Its lanes are loops.
class Warp {
 public:
  Warp(const Launch& launch, Block& block, uint32_t block_idx, uint32_t warp_idx)
      : launch_(launch), block_(block), block_idx_(block_idx), warp_idx_(warp_idx) {}

  void Enter();
  void Leave(const std::function<void()>& fill);
  // Waits until the flag has reached this epoch; false if the call was given up.
  bool Wait(Address flag, uint32_t peer, uint32_t index);
  uint32_t Claim(uint64_t counter);
  void BLOCK_BARRIER() { block_.barrier.arrive_and_wait(); }
  bool BLOCK_BARRIER_OR(bool vote);

  bool broken() const { return broken_; }
  uint64_t epoch() const { return epoch_; }
  uint64_t half() const { return launch_.mutant == Mutant::kOneHalf ? 0 : epoch_ & 1; }
  uint32_t block() const { return block_idx_; }
  uint32_t warp() const { return warp_idx_; }
  const Launch& launch() const { return launch_; }
  std::vector<uint8_t>& shared() { return block_.shared; }
  // The release of a flag, or what a mutant makes of it.
  void ReleaseFlag(Address flag);

 private:
  void GiveUp(uint32_t phase, uint32_t peer, uint32_t index, uint64_t seen);

  const Launch& launch_;
  Block& block_;
  uint32_t block_idx_, warp_idx_;
  uint64_t epoch_ = 0;
  bool broken_ = false;
};

// The kernels. Each runs one warp from JOIN to EXIT.
void RunPlan(Warp& warp);
void RunDispatch(Warp& warp);
void RunCombine(Warp& warp);

// Runs a launch to its end: what a stream does with a kernel.
void RunLaunch(const Launch& launch);

}  // namespace twin

#endif  // JAX_MOE_TESTS_TWIN_KERNEL_H_
