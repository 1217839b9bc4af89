// The twin of ptx/plan.ptx, phase by phase.
#include <algorithm>

#include "kernel.h"

namespace twin {
namespace {

struct Plan {
  Warp& warp;
  const Params& p;
  uint32_t num_ids, row, all_segments, local;
  uint64_t ids, counts;  // byte offsets in any pool, this epoch's half
  // The block's shared memory: kWarps tallies, then next, total, first, kept.
  uint32_t* tally;
  uint32_t *next, *total, *first, *kept, *used_rows;
};

uint32_t* Tally(const Plan& plan, uint32_t warp) { return plan.tally + warp * plan.row; }

// The warp's part of a segment: fixed ranges, so that counts do not depend on who is first.
std::pair<uint32_t, uint32_t> Range(const Plan& plan) {
  const uint32_t each = static_cast<uint32_t>(jax_moe::ptx::CeilDiv(plan.p.segment_ids, kWarps));
  const uint32_t begin = std::min(plan.warp.warp() * each, plan.p.segment_ids);
  return {begin, std::min(begin + each, plan.p.segment_ids)};
}

// ==== 2 SEND =====================================================================================
void SendIds(const Plan& plan, uint32_t segment) {
  const Launch& launch = plan.warp.launch();
  const auto* in = launch.array<const int32_t>(ABI_PLAN_EXPERT_IDS_IN);
  auto* out = launch.array<int32_t>(ABI_PLAN_EXPERT_IDS);
  uint32_t* tally = Tally(plan, plan.warp.warp());
  std::fill_n(tally, plan.row, 0);
  const uint64_t place =
      (launch.rank * plan.p.num_segments + segment) * uint64_t{plan.p.segment_ids};
  const auto [begin, end] = Range(plan);
  for (uint32_t from = begin; from < end; from++) {
    const uint32_t index = segment * plan.p.segment_ids + from;
    const bool real = index < plan.num_ids;
    int32_t id = real ? in[index] : -1;
    const bool valid = static_cast<uint32_t>(id) < plan.p.num_experts;
    if (!valid && id != -1) tally[plan.p.num_experts]++;
    if (!valid) id = -1;
    if (valid) tally[id]++;
    if (real) out[index] = id;
    for (Address pool : launch.pools) {
      ST<uint16_t>(pool + plan.ids + (place + from) * 2, static_cast<uint16_t>(id));
    }
  }
}

void Send(const Plan& plan) {
  const Launch& launch = plan.warp.launch();
  for (uint32_t segment = plan.warp.block(); segment < plan.p.num_segments; segment += kBlocks) {
    SendIds(plan, segment);
    plan.warp.BLOCK_BARRIER();
    const uint64_t place = launch.rank * plan.p.num_segments + segment;
    for (uint32_t column = plan.warp.warp(); column < plan.row; column += kWarps) {
      uint32_t sum = 0;
      for (uint32_t w = 0; w < kWarps; w++) sum += Tally(plan, w)[column];
      for (Address pool : launch.pools) {
        ST<uint32_t>(pool + plan.counts + (place * plan.row + column) * 4, sum);
      }
    }
    plan.warp.BLOCK_BARRIER();
    for (uint32_t peer = plan.warp.warp(); peer < plan.p.num_ranks; peer += kWarps) {
      plan.warp.ReleaseFlag(launch.pools[peer] + ABI_POOL_PLAN_FLAGS + place * ABI_FLAG_BYTES);
    }
  }
}

// ==== 3 ARRIVE ===================================================================================
bool Arrive(const Plan& plan) {
  bool failed = false;
  for (uint32_t i = plan.warp.warp(); i < plan.all_segments && !failed; i += kWarps) {
    const Address flag = plan.warp.launch().pool() + ABI_POOL_PLAN_FLAGS + i * ABI_FLAG_BYTES;
    failed = !plan.warp.Wait(flag, i / plan.p.num_segments, i % plan.p.num_segments);
  }
  return !plan.warp.BLOCK_BARRIER_OR(failed);
}

// ==== 4 SCAN =====================================================================================
void Scan(const Plan& plan, uint32_t begin_segment) {
  const Address counts = plan.warp.launch().pool() + plan.counts;
  for (uint32_t column = plan.warp.warp(); column < plan.row; column += kWarps) {
    uint32_t before = 0, all = 0;
    for (uint32_t segment = 0; segment < plan.all_segments; segment++) {
      const auto count = LD<uint32_t>(counts + (uint64_t{segment} * plan.row + column) * 4);
      if (segment < begin_segment) before += count;
      all += count;
    }
    plan.next[column] = before;
    plan.total[column] = all;
  }
  plan.warp.BLOCK_BARRIER();
}

// ==== 5 PLACE ====================================================================================
void Place(const Plan& plan) {
  const uint32_t alignment = plan.p.alignment;
  auto align = [&](uint32_t rows) { return (rows + alignment - 1) / alignment * alignment; };
  for (uint32_t rank = plan.warp.warp(); rank < plan.p.num_ranks; rank += kWarps) {
    const uint32_t base = rank * plan.local;
    const uint32_t* total = plan.total + base;
    uint32_t low = 0, high = *std::max_element(total, total + plan.local), cap = high;
    for (;;) {
      uint64_t sum = 0;
      for (uint32_t e = 0; e < plan.local; e++) sum += align(std::min(total[e], cap));
      (sum <= plan.p.capacity ? low : high) = sum <= plan.p.capacity ? cap : cap - 1;
      if (low >= high) break;
      cap = low + (high - low + 1) / 2;
    }
    uint32_t offset = 0;
    for (uint32_t e = 0; e < plan.local; e++) {
      plan.kept[base + e] = std::min(total[e], low);
      plan.first[base + e] = offset;
      offset += align(plan.kept[base + e]);
    }
    if (rank == plan.warp.launch().rank) *plan.used_rows = offset;
  }
  plan.warp.BLOCK_BARRIER();
}

// ==== 6 WRITE ====================================================================================
void WriteIds(const Plan& plan, uint32_t segment) {
  const Launch& launch = plan.warp.launch();
  const uint32_t source = segment / plan.p.num_segments, in_source = segment % plan.p.num_segments;
  uint32_t* tally = Tally(plan, plan.warp.warp());
  const auto [begin, end] = Range(plan);
  for (uint32_t from = begin; from < end; from++) {
    const uint32_t index = in_source * plan.p.segment_ids + from;
    if (index >= plan.num_ids) continue;
    const uint64_t at = uint64_t{segment} * plan.p.segment_ids + from;
    const uint32_t id = LD<uint16_t>(launch.pool() + plan.ids + at * 2);
    int32_t position = -1;
    if (id < plan.p.num_experts) {
      const uint32_t place = tally[id]++;
      if (place < plan.kept[id]) position = static_cast<int32_t>(plan.first[id] + place);
    }
    const uint32_t code = source * plan.num_ids + index;
    const bool here = position >= 0 && id / plan.local == launch.rank;
    launch.array<int32_t>(ABI_PLAN_ARRIVALS)[code] = here ? position : -1;
    if (here) launch.array<int32_t>(ABI_PLAN_SOURCES)[position] = static_cast<int32_t>(code);
    if (source == launch.rank) launch.array<int32_t>(ABI_PLAN_POSITIONS)[index] = position;
  }
}

void WriteSegment(const Plan& plan, uint32_t segment) {
  uint32_t* tally = Tally(plan, plan.warp.warp());
  std::fill_n(tally, plan.row, 0);
  const auto [begin, end] = Range(plan);
  for (uint32_t from = begin; from < end; from++) {
    const uint64_t at = uint64_t{segment} * plan.p.segment_ids + from;
    const uint32_t id = LD<uint16_t>(plan.warp.launch().pool() + plan.ids + at * 2);
    if (id < plan.p.num_experts) tally[id]++;
  }
  plan.warp.BLOCK_BARRIER();
  for (uint32_t column = plan.warp.warp(); column < plan.p.num_experts; column += kWarps) {
    for (uint32_t w = 0; w < kWarps; w++) {
      const uint32_t count = Tally(plan, w)[column];
      Tally(plan, w)[column] = plan.next[column];
      plan.next[column] += count;
    }
  }
  plan.warp.BLOCK_BARRIER();
  WriteIds(plan, segment);
  plan.warp.BLOCK_BARRIER();
}

void WriteRest(const Plan& plan) {
  const Launch& launch = plan.warp.launch();
  const uint32_t alignment = plan.p.alignment;
  auto* sources = launch.array<int32_t>(ABI_PLAN_SOURCES);
  const uint32_t unit = plan.warp.block() * kWarps + plan.warp.warp(), units = kBlocks * kWarps;
  for (uint32_t row = *plan.used_rows + unit; row < plan.p.capacity; row += units)
    sources[row] = -1;
  for (uint32_t e = unit; e < plan.local; e += units) {
    const uint32_t expert = launch.rank * plan.local + e, kept = plan.kept[expert];
    const uint32_t padded = (kept + alignment - 1) / alignment * alignment;
    for (uint32_t row = kept; row < padded; row++) sources[plan.first[expert] + row] = -1;
    launch.array<int32_t>(ABI_PLAN_GROUP_SIZES)[e] = static_cast<int32_t>(kept);
    launch.array<int32_t>(ABI_PLAN_PADDED_GROUP_SIZES)[e] = static_cast<int32_t>(padded);
    launch.array<int32_t>(ABI_PLAN_DROPPED)[e] = static_cast<int32_t>(plan.total[expert] - kept);
  }
  if (unit != 0) return;
  uint32_t invalid = 0;
  for (uint32_t s = 0; s < plan.p.num_segments; s++) {
    const uint64_t place = launch.rank * plan.p.num_segments + s;
    invalid +=
        LD<uint32_t>(launch.pool() + plan.counts + (place * plan.row + plan.p.num_experts) * 4);
  }
  *launch.array<int32_t>(ABI_PLAN_INVALID) = static_cast<int32_t>(invalid);
}

void Fill(const Plan& plan) {
  const Launch& launch = plan.warp.launch();
  std::fill_n(launch.array<int32_t>(ABI_PLAN_POSITIONS), plan.num_ids, -1);
  std::fill_n(launch.array<int32_t>(ABI_PLAN_SOURCES), plan.p.capacity, -1);
}

Plan MakePlan(Warp& warp) {
  const Params& p = warp.launch().params;
  Plan plan{warp,
            p,
            p.num_tokens * p.topk,
            jax_moe::ptx::CountRow(p.num_experts),
            p.num_segments * p.num_ranks,
            p.num_experts / p.num_ranks,
            p.ids + warp.half() * p.ids_stride,
            p.counts + warp.half() * p.counts_stride,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr};
  if (warp.warp() == 0) warp.shared().resize(((kWarps + 4) * plan.row + 1) * 4);
  warp.BLOCK_BARRIER();
  plan.tally = reinterpret_cast<uint32_t*>(warp.shared().data());
  plan.next = plan.tally + kWarps * plan.row;
  plan.total = plan.next + plan.row;
  plan.first = plan.total + plan.row;
  plan.kept = plan.first + plan.row;
  plan.used_rows = plan.kept + plan.row;
  return plan;
}

}  // namespace

void RunPlan(Warp& warp) {
  warp.Enter();
  const Plan plan = MakePlan(warp);
  if (!warp.broken()) {
    Send(plan);
    if (Arrive(plan)) {
      const uint32_t begin = plan.all_segments * warp.block() / kBlocks;
      const uint32_t end = plan.all_segments * (warp.block() + 1) / kBlocks;
      Scan(plan, begin);
      Place(plan);
      for (uint32_t segment = begin; segment < end; segment++) WriteSegment(plan, segment);
      WriteRest(plan);
    }
  }
  warp.Leave([&] { Fill(plan); });
}

}  // namespace twin
