// The twin of ptx/dispatch.ptx, phase by phase.
#include <algorithm>
#include <limits>

#include "kernel.h"

namespace twin {
namespace {

constexpr uint32_t kStages = 2;

struct Dispatch {
  Warp& warp;
  const Launch& launch;
  const Params& p;
  uint32_t local;
  uint64_t gates, slots;  // byte offsets in any pool, this epoch's half
  std::vector<uint8_t> ring[kStages];
  uint32_t stage = 0;
  BulkStores stores;

  // ptx/move.ptxh: one load into the ring, one store for each destination.
  void Move(const uint8_t* source, const std::vector<Address>& destinations) {
    if (destinations.empty()) return;
    if (launch.mutant != Mutant::kRingReuse) stores.BULK_WAIT_READ();
    std::vector<uint8_t>& bytes = ring[stage];
    stage = (stage + 1) % kStages;
    std::memcpy(bytes.data(), source, p.payload_bytes);
    for (Address to : destinations) stores.BULK_STORE(to, bytes.data(), p.payload_bytes);
  }
};

// ==== 2 SEND =====================================================================================
void SendToken(Dispatch& d, uint32_t token) {
  const auto* ids = d.launch.array<const int32_t>(ABI_DISPATCH_EXPERT_IDS);
  const auto* positions = d.launch.array<const int32_t>(ABI_DISPATCH_POSITIONS);
  const auto* s = d.launch.array<const float>(ABI_DISPATCH_S);
  std::vector<Address> destinations;
  uint64_t seen = 0;
  for (uint32_t k = 0; k < d.p.topk; k++) {
    const uint32_t index = token * d.p.topk + k;
    if (positions[index] < 0) continue;
    const uint32_t peer = ids[index] / d.local;
    if (peer == d.launch.rank) continue;
    const uint64_t slot = uint64_t{d.launch.rank} * d.p.num_tokens + token;
    ST<float>(d.launch.pools[peer] + d.gates + (slot * d.p.topk + k) * 4, s[index]);
    if (seen >> peer & 1) continue;
    seen |= uint64_t{1} << peer;
    destinations.push_back(d.launch.pools[peer] + d.slots + slot * d.p.slot_bytes);
  }
  d.Move(d.launch.array<const uint8_t>(ABI_DISPATCH_X) + uint64_t{token} * d.p.payload_bytes,
         destinations);
}

void SendFlags(Dispatch& d, uint32_t chunk) {
  const uint64_t index = uint64_t{d.launch.rank} * d.p.num_chunks + chunk;
  for (uint32_t peer = 0; peer < d.p.num_ranks; peer++) {
    if (peer == d.launch.rank) continue;
    d.warp.ReleaseFlag(d.launch.pools[peer] + d.p.chunk_flags + index * ABI_FLAG_BYTES);
  }
}

void Send(Dispatch& d) {
  for (;;) {
    const uint32_t chunk = d.warp.Claim(ABI_POOL_CLAIMED_SENDS);
    if (chunk >= d.p.num_chunks) return;
    const uint32_t first = chunk * d.p.chunk_tokens;
    const uint32_t end = std::min(first + d.p.chunk_tokens, d.p.num_tokens);
    for (uint32_t token = first; token < end; token++) SendToken(d, token);
    if (d.launch.mutant == Mutant::kFlagBeforeWrites) SendFlags(d, chunk);
    d.stores.BULK_WAIT_WRITES();
    SendFlags(d, chunk);
  }
}

// ==== 3 EXPAND ===================================================================================
void ExpandToken(Dispatch& d, uint32_t source, uint32_t token) {
  const bool own = source == d.launch.rank;
  const auto* arrivals = d.launch.array<const int32_t>(ABI_DISPATCH_ARRIVALS);
  const uint64_t slot = uint64_t{source} * d.p.num_tokens + token;
  std::vector<Address> destinations;
  for (uint32_t k = 0; k < d.p.topk; k++) {
    const int32_t row = arrivals[slot * d.p.topk + k];
    if (row < 0) continue;
    const float gate = own ? d.launch.array<const float>(ABI_DISPATCH_S)[token * d.p.topk + k]
                           : LD<float>(d.launch.pool() + d.gates + (slot * d.p.topk + k) * 4);
    d.launch.array<float>(ABI_DISPATCH_ROW_S)[row] = gate;
    destinations.push_back(d.launch.array<uint8_t>(ABI_DISPATCH_ROWS) +
                           uint64_t(row) * d.p.payload_bytes);
  }
  const uint8_t* from =
      own ? d.launch.array<const uint8_t>(ABI_DISPATCH_X) + uint64_t{token} * d.p.payload_bytes
          : d.launch.pool() + d.slots + slot * d.p.slot_bytes;
  d.Move(from, destinations);
}

bool Expand(Dispatch& d) {
  for (;;) {
    const uint32_t unit = d.warp.Claim(ABI_POOL_CLAIMED_RECEIVES);
    if (unit >= d.p.num_chunks * d.p.num_ranks) return true;
    const uint32_t chunk = unit / d.p.num_ranks;
    const uint32_t source = (d.launch.rank + unit % d.p.num_ranks) % d.p.num_ranks;
    const uint64_t index = uint64_t{source} * d.p.num_chunks + chunk;
    const Address flag = d.launch.pool() + d.p.chunk_flags + index * ABI_FLAG_BYTES;
    if (source != d.launch.rank && !d.warp.Wait(flag, source, chunk)) return false;
    const uint32_t first = chunk * d.p.chunk_tokens;
    const uint32_t end = std::min(first + d.p.chunk_tokens, d.p.num_tokens);
    for (uint32_t token = first; token < end; token++) ExpandToken(d, source, token);
  }
}

// ==== 4 ZERO =====================================================================================
void Zero(Dispatch& d) {
  const auto* sources = d.launch.array<const int32_t>(ABI_DISPATCH_SOURCES);
  const auto* padded = d.launch.array<const int32_t>(ABI_DISPATCH_PADDED_GROUP_SIZES);
  uint32_t used = d.p.capacity;
  if ((d.p.flags & ABI_FLAG_ZERO_TAIL) == 0) {
    used = 0;
    for (uint32_t e = 0; e < d.local; e++) used += static_cast<uint32_t>(padded[e]);
  }
  const uint32_t first = d.warp.block() * kWarps + d.warp.warp();
  for (uint32_t row = first; row < used; row += kBlocks * kWarps) {
    if (sources[row] >= 0) continue;
    d.launch.array<float>(ABI_DISPATCH_ROW_S)[row] = 0;
    std::memset(d.launch.array<uint8_t>(ABI_DISPATCH_ROWS) + uint64_t{row} * d.p.payload_bytes, 0,
                d.p.payload_bytes);
  }
}

}  // namespace

void RunDispatch(Warp& warp) {
  warp.Enter();
  const Launch& launch = warp.launch();
  const Params& p = launch.params;
  Dispatch d{warp,
             launch,
             p,
             p.num_experts / p.num_ranks,
             p.gates + warp.half() * p.gates_stride,
             p.slots + warp.half() * p.slots_stride,
             {},
             0,
             {}};
  for (auto& stage : d.ring) stage.resize(p.payload_bytes);
  if (!warp.broken()) {
    if (warp.block() < p.link_blocks && (p.link_blocks < kBlocks || warp.warp() == 0)) Send(d);
    const bool arrived = Expand(d);
    d.stores.BULK_WAIT_WRITES();
    if (arrived) Zero(d);
  }
  warp.Leave([&] {
    std::fill_n(launch.array<float>(ABI_DISPATCH_ROWS), uint64_t{p.capacity} * p.payload_bytes / 4,
                std::numeric_limits<float>::quiet_NaN());
  });
}

}  // namespace twin
