// The protocol twin. twin STEPS [MUTANT]: random calls on free-running ranks against the
// specification, the epoch wrapping; then ranks that stay away. With a mutant (a deliberate fault)
// a run is expected to fail. Status 0: all right. 1: a wrong result. ThreadSanitizer adds its own.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "world.h"

namespace {

using twin::Call;
using twin::Mutant;
using twin::World;

Mutant MutantOf(const std::string& name) {
  if (name == "none") return Mutant::kNone;
  if (name == "one_half") return Mutant::kOneHalf;
  if (name == "flag_before_writes") return Mutant::kFlagBeforeWrites;
  if (name == "flag_relaxed") return Mutant::kFlagRelaxed;
  if (name == "ring_reuse") return Mutant::kRingReuse;
  std::fprintf(stderr, "unknown mutant %s\n", name.c_str());
  std::exit(2);
}

// Every rank runs all calls, as fast as its peers let it. True if all results are right.
bool Soak(World& world, const std::vector<Call>& calls) {
  std::vector<std::string> wrong(world.ranks());
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < world.ranks(); rank++) {
    ranks.emplace_back([&, rank] {
      for (size_t i = 0; i < calls.size() && wrong[rank].empty(); i++) {
        const std::string what = world.RunCall(rank, calls[i]);
        if (!what.empty()) wrong[rank] = "call " + std::to_string(i) + ": " + what;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (uint32_t rank = 0; rank < world.ranks(); rank++) {
    if (wrong[rank].empty()) continue;
    std::printf("rank %u of %u, %s is wrong\n", rank, world.ranks(), wrong[rank].c_str());
    return false;
  }
  return true;
}

#define REQUIRE(condition)                                                \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      return false;                                                       \
    }                                                                     \
  } while (false)

// The last rank never runs (silent: its join flags are set all the same). The others' calls end,
// filled.
bool StaysAway(int operation, bool silent) {
  World world(3, Mutant::kNone);
  world.Rebuild(0, 500'000'000);
  const Call call = twin::DrawCall(3, 1);
  const uint32_t away = 2;
  if (silent) {
    for (uint32_t rank = 0; rank < away; rank++) {
      twin::ST_RELAXED_SYS_U64(world.pool(rank) + ABI_POOL_JOIN_FLAGS + away * ABI_FLAG_BYTES, 1);
    }
  }
  std::vector<twin::Buffers> buffers;
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < away; rank++) {
    buffers.push_back(twin::MakeBuffers(call, rank));
    auto take = [&](std::vector<int32_t>& to, const std::vector<int32_t>& stacked) {
      to.assign(stacked.begin() + rank * to.size(), stacked.begin() + (rank + 1) * to.size());
    };
    take(buffers[rank].expert_ids, call.plan.expert_ids);
    take(buffers[rank].positions, call.plan.positions);
    take(buffers[rank].sources, call.plan.sources);
    take(buffers[rank].arrivals, call.plan.arrivals);
    take(buffers[rank].padded_group_sizes, call.plan.padded_group_sizes);
  }
  for (uint32_t rank = 0; rank < away; rank++) {
    ranks.emplace_back(
        [&, rank] { twin::RunLaunch(world.MakeLaunch(rank, operation, call, buffers[rank])); });
  }
  for (std::thread& rank : ranks) rank.join();
  bool cause = false;
  for (uint32_t rank = 0; rank < away; rank++) {
    const auto record = world.record(rank);
    REQUIRE(record.valid == 1 && record.rank == rank);
    REQUIRE(record.operation == static_cast<uint32_t>(operation));
    if (record.phase != ABI_PHASE_ABORTED) {
      REQUIRE(record.phase == (silent ? ABI_PHASE_ARRIVE : ABI_PHASE_JOIN));
      REQUIRE(record.peer == away && record.expected == 1 && record.seen == 0);
      cause = true;
    }
    const auto* out = reinterpret_cast<const float*>(
        operation == ABI_OPERATION_DISPATCH ? buffers[rank].rows.data() : buffers[rank].y.data());
    REQUIRE(operation == ABI_OPERATION_PLAN ? buffers[rank].positions[0] == -1
                                            : std::isnan(out[0]));
  }
  REQUIRE(cause);
  // Rebuilt, the same ranks and the one that was away work together.
  world.Rebuild(0, 20'000'000'000);
  return Soak(world, {call, call});
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 20;
  const Mutant mutant = MutantOf(argc > 2 ? argv[2] : "none");
  for (uint32_t ranks : {1, 2, 3, 4}) {
    std::vector<Call> calls;
    for (int i = 0; i < steps; i++)
      calls.push_back(twin::DrawCall(ranks, 100 * ranks + static_cast<uint64_t>(i)));
    World world(ranks, mutant);
    // The epoch passes 2^64 halfway.
    world.Rebuild(0 - static_cast<uint64_t>(steps) * ABI_NUM_OPERATIONS / 2, 20'000'000'000);
    if (!Soak(world, calls)) return 1;
    std::printf("%d calls right on %u ranks\n", steps, ranks);
  }
  if (mutant != Mutant::kNone) return 0;
  for (int operation = 1; operation <= ABI_NUM_OPERATIONS; operation++) {
    for (bool silent : {false, true}) {
      if (!StaysAway(operation, silent)) return 1;
    }
  }
  std::printf("ranks that stay away are reported, and the group works again once rebuilt\n");
  return 0;
}
