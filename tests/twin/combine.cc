// The twin of ptx/combine.ptx, phase by phase, for float32 numbers whose sums are exact.
#include <algorithm>
#include <limits>

#include "kernel.h"

namespace twin {
namespace {

struct Combine {
  Warp& warp;
  const Launch& launch;
  const Params& p;
  uint32_t local, elements;
  bool by_node;
  uint64_t gates, slots;  // byte offsets in any pool, this epoch's half

  const uint8_t* Row(int32_t row) const {
    return launch.array<const uint8_t>(ABI_COMBINE_ROWS) + uint64_t(row) * p.payload_bytes;
  }
  // out = the sum of the terms, element by element; nothing of it depends on the order here.
  void Sum(Address out, const std::vector<const uint8_t*>& terms) const {
    for (uint32_t element = 0; element < elements; element++) {
      float sum = 0;
      for (const uint8_t* term : terms) sum += LD<float>(term + element * 4);
      ST<float>(out + element * 4, sum);
    }
  }
};

// ==== 2 SUM ======================================================================================
void SumToken(const Combine& c, uint32_t owner, uint32_t token) {
  const auto* arrivals = c.launch.array<const int32_t>(ABI_COMBINE_ARRIVALS);
  const auto* row_s = c.launch.array<const float>(ABI_COMBINE_ROW_S);
  const Address pool = c.launch.pools[owner];
  std::vector<const uint8_t*> terms;
  for (uint32_t k = 0; k < c.p.topk; k++) {
    const uint64_t index = uint64_t{token} * c.p.topk + k;
    const int32_t row = arrivals[uint64_t{owner} * c.p.num_tokens * c.p.topk + index];
    if (row < 0) continue;
    ST<float>(pool + c.gates + index * 4, row_s[row]);
    terms.push_back(c.Row(row));
  }
  const uint64_t slot = uint64_t{c.launch.rank} * c.p.num_tokens + token;
  if (!terms.empty()) c.Sum(pool + c.slots + slot * c.p.slot_bytes, terms);
}

void Sum(const Combine& c) {
  const uint32_t first_owner = c.by_node ? 0 : 1, num_owners = c.p.num_ranks - first_owner;
  for (;;) {
    const uint32_t unit = c.warp.Claim(ABI_POOL_CLAIMED_SENDS);
    if (unit >= c.p.num_chunks * num_owners) return;
    const uint32_t chunk = unit / num_owners;
    const uint32_t owner = (c.launch.rank + first_owner + unit % num_owners) % c.p.num_ranks;
    const uint32_t first = chunk * c.p.chunk_tokens;
    const uint32_t end = std::min(first + c.p.chunk_tokens, c.p.num_tokens);
    const uint64_t index = uint64_t{c.launch.rank} * c.p.num_chunks + chunk;
    const Address flag = c.launch.pools[owner] + c.p.chunk_flags + index * ABI_FLAG_BYTES;
    if (c.launch.mutant == Mutant::kFlagBeforeWrites) c.warp.ReleaseFlag(flag);
    for (uint32_t token = first; token < end; token++) SumToken(c, owner, token);
    c.warp.ReleaseFlag(flag);
  }
}

// ==== 3 ADD ======================================================================================
void AddToken(const Combine& c, uint32_t token) {
  const auto* ids = c.launch.array<const int32_t>(ABI_COMBINE_EXPERT_IDS);
  const auto* positions = c.launch.array<const int32_t>(ABI_COMBINE_POSITIONS);
  const auto* row_s = c.launch.array<const float>(ABI_COMBINE_ROW_S);
  std::vector<const uint8_t*> terms;
  uint64_t seen = 0;
  for (uint32_t k = 0; k < c.p.topk; k++) {
    const uint64_t index = uint64_t{token} * c.p.topk + k;
    float gate = 0;
    if (positions[index] >= 0) {
      const uint32_t peer = ids[index] / c.local;
      const bool own = peer == c.launch.rank && !c.by_node;
      gate = own ? row_s[positions[index]] : LD<float>(c.launch.pool() + c.gates + index * 4);
      const uint64_t slot = uint64_t{peer} * c.p.num_tokens + token;
      if (own) {
        terms.push_back(c.Row(positions[index]));
      } else if ((seen >> peer & 1) == 0) {
        terms.push_back(c.launch.pool() + c.slots + slot * c.p.slot_bytes);
      }
      seen |= uint64_t{1} << peer;
    }
    c.launch.array<float>(ABI_COMBINE_S)[index] = gate;
  }
  c.Sum(c.launch.array<uint8_t>(ABI_COMBINE_Y) + uint64_t{token} * c.p.payload_bytes, terms);
}

bool Add(const Combine& c) {
  for (;;) {
    const uint32_t chunk = c.warp.Claim(ABI_POOL_CLAIMED_RECEIVES);
    if (chunk >= c.p.num_chunks) return true;
    for (uint32_t source = 0; source < c.p.num_ranks; source++) {
      if (source == c.launch.rank && !c.by_node) continue;
      const uint64_t index = uint64_t{source} * c.p.num_chunks + chunk;
      const Address flag = c.launch.pool() + c.p.chunk_flags + index * ABI_FLAG_BYTES;
      if (!c.warp.Wait(flag, source, chunk)) return false;
    }
    const uint32_t first = chunk * c.p.chunk_tokens;
    const uint32_t end = std::min(first + c.p.chunk_tokens, c.p.num_tokens);
    for (uint32_t token = first; token < end; token++) AddToken(c, token);
  }
}

}  // namespace

void RunCombine(Warp& warp) {
  warp.Enter();
  const Launch& launch = warp.launch();
  const Params& p = launch.params;
  const Combine c{warp,
                  launch,
                  p,
                  p.num_experts / p.num_ranks,
                  p.payload_bytes / 4,
                  p.num_nodes > 1,
                  p.gates + warp.half() * p.gates_stride,
                  p.slots + warp.half() * p.slots_stride};
  if (!warp.broken()) {
    if (warp.block() < p.link_blocks && (p.link_blocks < kBlocks || warp.warp() == 0)) Sum(c);
    Add(c);
  }
  warp.Leave([&] {
    std::fill_n(launch.array<float>(ABI_COMBINE_Y), uint64_t{p.num_tokens} * c.elements,
                std::numeric_limits<float>::quiet_NaN());
  });
}

}  // namespace twin
