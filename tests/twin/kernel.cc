#include "kernel.h"

#include <algorithm>
#include <thread>

namespace twin {

// ==== JOIN: ptx/enter.ptxh =======================================================================
void Warp::Enter() {
  const Address pool = launch_.pool();
  epoch_ = LD_RELAXED_GPU_U64(pool + ABI_POOL_EPOCH) + 1;
  broken_ = BLOCK_BARRIER_OR(LD_RELAXED_SYS_U32(pool + ABI_POOL_ABORT) != 0);
  if (block_idx_ != 0 || warp_idx_ != 0) return;
  const uint32_t busy = ATOM_ACQ_REL_GPU_ADD_U32(pool + ABI_POOL_BUSY, 1);
  if (busy != 0) GiveUp(ABI_PHASE_OVERLAP, launch_.rank, 0, busy);
  for (Address peer : launch_.pools) {
    ST_RELAXED_SYS_U64(peer + ABI_POOL_JOIN_FLAGS + launch_.rank * ABI_FLAG_BYTES, epoch_);
  }
}

// ==== ptx/give_up.ptxh ===========================================================================
void Warp::GiveUp(uint32_t phase, uint32_t peer, uint32_t index, uint64_t seen) {
  const Address pool = launch_.pool();
  if (ATOM_RELAXED_GPU_CAS_B32(pool + ABI_POOL_REPORTED, 0, 1) == 0) {
    const Address record = launch_.report + ABI_REPORT_RECORDS;
    ST<uint32_t>(record + ABI_RECORD_OPERATION, launch_.operation);
    ST<uint32_t>(record + ABI_RECORD_PHASE, phase);
    ST<uint32_t>(record + ABI_RECORD_RANK, launch_.rank);
    ST<uint32_t>(record + ABI_RECORD_PEER, peer);
    ST<uint32_t>(record + ABI_RECORD_INDEX, index);
    ST<uint64_t>(record + ABI_RECORD_EXPECTED, epoch_);
    ST<uint64_t>(record + ABI_RECORD_SEEN, seen);
    ST_RELEASE_SYS_U32(record + ABI_RECORD_VALID, 1);
  }
  if (LD_RELAXED_SYS_U32(pool + ABI_POOL_ABORT) != 0) return;
  for (Address peer_pool : launch_.pools) {
    ST_RELAXED_SYS_U32(peer_pool + ABI_POOL_ABORT, 1 + launch_.rank);
  }
}

// ==== ptx/wait.ptxh ==============================================================================
bool Warp::Wait(Address flag, uint32_t peer, uint32_t index) {
  using Clock = std::chrono::steady_clock;
  const Address pool = launch_.pool();
  auto clock = Clock::now();
  bool joined = false;
  for (uint32_t polls = 1;; polls++) {
    const uint64_t seen = LD_ACQUIRE_SYS_U64(flag);
    if (static_cast<int64_t>(seen - epoch_) >= 0) return true;
    std::this_thread::yield();
    if (polls % 16 != 0) continue;
    if (LD_RELAXED_SYS_U32(pool + ABI_POOL_ABORT) != 0) return false;
    if (!joined) {
      const uint64_t join = LD_RELAXED_SYS_U64(pool + ABI_POOL_JOIN_FLAGS + peer * ABI_FLAG_BYTES);
      joined = static_cast<int64_t>(join - epoch_) >= 0;
      if (joined) clock = Clock::now();
    }
    const uint64_t limit = LD_RELAXED_SYS_U64(
        launch_.report + (joined ? ABI_REPORT_FLIGHT_TIMEOUT_NS : ABI_REPORT_JOIN_TIMEOUT_NS));
    const auto waited = std::chrono::nanoseconds(Clock::now() - clock).count();
    const bool aborted = LD_RELAXED_SYS_U32(launch_.report + ABI_REPORT_HOST_ABORT) != 0;
    if (!aborted && static_cast<uint64_t>(waited) <= limit) continue;
    GiveUp(aborted  ? ABI_PHASE_ABORTED
           : joined ? ABI_PHASE_ARRIVE
                    : ABI_PHASE_JOIN,
           peer, index, seen);
    return false;
  }
}

// ==== ptx/claim.ptxh =============================================================================
uint32_t Warp::Claim(uint64_t counter) {
  Delay();
  return ATOM_RELAXED_GPU_ADD_U32(launch_.pool() + counter, 1);
}

bool Warp::BLOCK_BARRIER_OR(bool vote) {
  block_.votes[warp_idx_] = vote;
  BLOCK_BARRIER();
  const bool any =
      std::any_of(std::begin(block_.votes), std::end(block_.votes), [](bool v) { return v; });
  BLOCK_BARRIER();
  return any;
}

void Warp::ReleaseFlag(Address flag) {
  if (launch_.mutant == Mutant::kFlagRelaxed) {
    ST_RELAXED_SYS_U64(flag, epoch_);
  } else {
    ST_RELEASE_SYS_U64(flag, epoch_);
  }
}

// ==== EXIT: ptx/leave.ptxh =======================================================================
void Warp::Leave(const std::function<void()>& fill) {
  const Address pool = launch_.pool();
  BLOCK_BARRIER();
  bool last = false;
  if (warp_idx_ == 0) last = ATOM_ACQ_REL_GPU_ADD_U32(pool + ABI_POOL_EXITS, 1) + 1 == kBlocks;
  if (!BLOCK_BARRIER_OR(last)) return;
  if (warp_idx_ == 0) {
    ST_RELAXED_GPU_U32(pool + ABI_POOL_EXITS, 0);
    ST_RELAXED_GPU_U32(pool + ABI_POOL_CLAIMED_SENDS, 0);
    ST_RELAXED_GPU_U32(pool + ABI_POOL_CLAIMED_RECEIVES, 0);
    ST_RELAXED_GPU_U64(pool + ABI_POOL_EPOCH, epoch_);
    const uint32_t busy = ATOM_ACQ_REL_GPU_ADD_U32(pool + ABI_POOL_BUSY, -1);
    const uint32_t abort = LD_RELAXED_SYS_U32(pool + ABI_POOL_ABORT);
    if (busy != 1) {
      GiveUp(ABI_PHASE_OVERLAP, launch_.rank, 0, busy);
    } else if (abort != 0) {
      GiveUp(ABI_PHASE_ABORTED, abort - 1, 0, busy);
    }
  }
  BLOCK_BARRIER();
  broken_ = BLOCK_BARRIER_OR(LD_RELAXED_SYS_U32(pool + ABI_POOL_ABORT) != 0);
  if (broken_ && warp_idx_ == 0) fill();
}

void RunLaunch(const Launch& launch) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::thread> threads;
  for (uint32_t b = 0; b < kBlocks; b++) {
    blocks.push_back(std::make_unique<Block>());
    for (uint32_t w = 0; w < kWarps; w++) {
      threads.emplace_back([&launch, block = blocks.back().get(), b, w] {
        Warp warp(launch, *block, b, w);
        Delay();
        if (launch.operation == ABI_OPERATION_PLAN) RunPlan(warp);
        if (launch.operation == ABI_OPERATION_DISPATCH) RunDispatch(warp);
        if (launch.operation == ABI_OPERATION_COMBINE) RunCombine(warp);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace twin
