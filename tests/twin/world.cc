#include "world.h"

#include <algorithm>
#include <random>

namespace twin {

using jax_moe::ptx::ArraySlot;

namespace {

constexpr uint32_t kMaxTokens = 12, kMaxTopk = 4, kMaxHidden = 24, kLocalExperts = 3;
constexpr uint32_t kPoison = 0xa5c3e187;

template <typename T>
std::vector<T> BlockOf(const std::vector<T>& stacked, uint32_t rank, uint32_t ranks) {
  const size_t count = stacked.size() / ranks;
  return {stacked.begin() + rank * count, stacked.begin() + (rank + 1) * count};
}
template <typename T>
std::vector<T> Poisoned(size_t count) {
  std::vector<uint32_t> words((count * sizeof(T) + 3) / 4, kPoison);
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), words.data(), count * sizeof(T));
  return values;
}

}  // namespace

Call DrawCall(uint32_t ranks, uint64_t seed) {
  std::mt19937_64 random(seed);
  auto draw = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  Call call{};
  call.sizes = {ranks,
                ranks % 2 == 0 && random() % 3 == 0 ? 2 : 1u,
                seed % 5 == 0 ? 0 : draw(1, kMaxTokens),
                draw(1, kMaxTopk),
                ranks * kLocalExperts,
                0,
                draw(1, 3),
                4 * draw(1, kMaxHidden / 4),
                false,
                random() % 2 == 0};
  call.chunk_tokens = draw(1, 4);
  call.link_blocks = draw(1, kBlocks);
  harness::Sizes& sizes = call.sizes;
  sizes.capacity = harness::WorstCapacity(sizes);
  if (random() % 3 == 0)
    sizes.capacity = sizes.tokens * sizes.topk / 2 / sizes.alignment * sizes.alignment;
  call.ids_in.resize(size_t{ranks} * sizes.tokens * sizes.topk);
  for (int32_t& id : call.ids_in) id = static_cast<int32_t>(draw(0, sizes.experts + 1)) - 1;
  call.plan = harness::OraclePlan(sizes, call.ids_in);
  const size_t tokens = size_t{ranks} * sizes.tokens, rows = size_t{ranks} * sizes.capacity;
  std::vector<float> x(tokens * sizes.hidden);
  for (float& value : x) value = static_cast<float>(draw(1, 1000));
  call.x.resize(x.size() * 4);
  if (!x.empty()) std::memcpy(call.x.data(), x.data(), call.x.size());
  call.s.resize(tokens * sizes.topk);
  for (float& value : call.s) value = static_cast<float>(draw(1, 1000));
  call.rows = Poisoned<uint8_t>(rows * sizes.payload_bytes());
  call.row_s = Poisoned<float>(rows);
  harness::OracleDispatch(sizes, call.plan, call.x, call.s, call.rows, call.row_s);
  call.y.resize(call.x.size());
  call.s_out.resize(call.s.size());
  harness::OracleCombine(sizes, call.plan, call.rows, call.row_s, call.y, call.s_out);
  return call;
}

Buffers MakeBuffers(const Call& call, uint32_t rank) {
  const harness::Sizes& sizes = call.sizes;
  const size_t ids = size_t{sizes.tokens} * sizes.topk;
  Buffers b;
  b.ids_in = BlockOf(call.ids_in, rank, sizes.ranks);
  b.expert_ids = Poisoned<int32_t>(ids);
  b.positions = Poisoned<int32_t>(ids);
  b.sources = Poisoned<int32_t>(sizes.capacity);
  b.arrivals = Poisoned<int32_t>(ids * sizes.ranks);
  b.group_sizes = b.padded_group_sizes = b.dropped = Poisoned<int32_t>(sizes.local_experts());
  b.invalid = Poisoned<int32_t>(1);
  b.x = BlockOf(call.x, rank, sizes.ranks);
  b.s = BlockOf(call.s, rank, sizes.ranks);
  b.rows = Poisoned<uint8_t>(size_t{sizes.capacity} * sizes.payload_bytes());
  b.row_s = Poisoned<float>(sizes.capacity);
  b.y = Poisoned<uint8_t>(b.x.size());
  b.s_out = Poisoned<float>(ids);
  return b;
}

std::string Compare(const Call& call, uint32_t rank, const Buffers& b) {
  auto same = [&](const auto& got, const auto& stacked) {
    const auto want = BlockOf(stacked, rank, call.sizes.ranks);
    return got.size() == want.size() &&
           (got.empty() || std::memcmp(got.data(), want.data(), got.size() * sizeof(got[0])) == 0);
  };
  if (!same(b.expert_ids, call.plan.expert_ids)) return "expert_ids";
  if (!same(b.positions, call.plan.positions)) return "positions";
  if (!same(b.sources, call.plan.sources)) return "sources";
  if (!same(b.arrivals, call.plan.arrivals)) return "arrivals";
  if (!same(b.group_sizes, call.plan.group_sizes)) return "group_sizes";
  if (!same(b.padded_group_sizes, call.plan.padded_group_sizes)) return "padded_group_sizes";
  if (!same(b.dropped, call.plan.dropped)) return "dropped";
  if (!same(b.invalid, call.plan.invalid)) return "invalid";
  if (!same(b.rows, call.rows)) return "rows";
  if (!same(b.row_s, call.row_s)) return "row_s";
  if (!same(b.y, call.y)) return "y";
  if (!same(b.s_out, call.s_out)) return "s";
  return "";
}

World::World(uint32_t ranks, Mutant mutant)
    : ranks_(ranks),
      mutant_(mutant),
      layout_(jax_moe::ptx::PoolLayout::Make(ranks, kMaxTokens, kMaxTopk, ranks * kLocalExperts,
                                             kMaxHidden * 4)) {}

void World::Rebuild(uint64_t epoch, uint64_t timeout_ns) {
  pools_.assign(ranks_, std::vector<uint64_t>(layout_.size / 8, 0));
  reports_.assign(ranks_, std::vector<uint64_t>(ABI_REPORT_BYTES / 8, 0));
  for (uint32_t rank = 0; rank < ranks_; rank++) {
    pools_[rank][ABI_POOL_EPOCH / 8] = epoch;
    const auto flags_end =
        pools_[rank].begin() + (layout_.chunk_flags + layout_.room.chunk_flags) / 8;
    std::fill(pools_[rank].begin() + ABI_POOL_JOIN_FLAGS / 8, flags_end, epoch);
    reports_[rank][ABI_REPORT_JOIN_TIMEOUT_NS / 8] = timeout_ns;
    reports_[rank][ABI_REPORT_FLIGHT_TIMEOUT_NS / 8] = timeout_ns;
  }
}

Launch World::MakeLaunch(uint32_t rank, int operation, const Call& call, Buffers& b) {
  const harness::Sizes& sizes = call.sizes;
  jax_moe::ptx::CallShape shape{sizes.ranks,
                                1,
                                rank,
                                sizes.nodes,
                                sizes.tokens,
                                sizes.topk,
                                sizes.experts,
                                sizes.capacity,
                                sizes.alignment,
                                sizes.payload_bytes(),
                                sizes.zero_tail,
                                false};
  Launch launch{MakeParams(shape, layout_, kBlocks, call.link_blocks, call.chunk_tokens),
                rank,
                operation,
                mutant_,
                {},
                reinterpret_cast<Address>(reports_[rank].data())};
  for (uint32_t peer = 0; peer < ranks_; peer++) launch.pools.push_back(pool(peer));
  auto put = [&](int offset, auto& array) {
    launch.params.arrays[ArraySlot(offset)] = reinterpret_cast<uint64_t>(array.data());
  };
  if (operation == ABI_OPERATION_PLAN) {
    put(ABI_PLAN_EXPERT_IDS_IN, b.ids_in), put(ABI_PLAN_EXPERT_IDS, b.expert_ids);
    put(ABI_PLAN_POSITIONS, b.positions), put(ABI_PLAN_SOURCES, b.sources),
        put(ABI_PLAN_ARRIVALS, b.arrivals);
    put(ABI_PLAN_GROUP_SIZES, b.group_sizes),
        put(ABI_PLAN_PADDED_GROUP_SIZES, b.padded_group_sizes);
    put(ABI_PLAN_DROPPED, b.dropped), put(ABI_PLAN_INVALID, b.invalid);
  } else if (operation == ABI_OPERATION_DISPATCH) {
    put(ABI_DISPATCH_X, b.x), put(ABI_DISPATCH_S, b.s), put(ABI_DISPATCH_EXPERT_IDS, b.expert_ids);
    put(ABI_DISPATCH_POSITIONS, b.positions), put(ABI_DISPATCH_SOURCES, b.sources);
    put(ABI_DISPATCH_ARRIVALS, b.arrivals),
        put(ABI_DISPATCH_PADDED_GROUP_SIZES, b.padded_group_sizes);
    put(ABI_DISPATCH_ROWS, b.rows), put(ABI_DISPATCH_ROW_S, b.row_s);
  } else {
    put(ABI_COMBINE_ROWS, b.rows), put(ABI_COMBINE_ROW_S, b.row_s),
        put(ABI_COMBINE_EXPERT_IDS, b.expert_ids);
    put(ABI_COMBINE_POSITIONS, b.positions), put(ABI_COMBINE_ARRIVALS, b.arrivals);
    put(ABI_COMBINE_Y, b.y), put(ABI_COMBINE_S, b.s_out);
  }
  return launch;
}

std::string World::RunCall(uint32_t rank, const Call& call) {
  Buffers buffers = MakeBuffers(call, rank);
  for (int operation = 1; operation <= ABI_NUM_OPERATIONS; operation++) {
    RunLaunch(MakeLaunch(rank, operation, call, buffers));
  }
  return Compare(call, rank, buffers);
}

jax_moe::ptx::Record World::record(uint32_t rank) const {
  jax_moe::ptx::Record record;
  std::memcpy(&record, reinterpret_cast<const uint8_t*>(reports_[rank].data()) + ABI_REPORT_RECORDS,
              sizeof record);
  return record;
}

}  // namespace twin
