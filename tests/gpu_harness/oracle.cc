#include "oracle.h"

#include <algorithm>
#include <cstring>

namespace harness {
namespace {

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float Flush(float value) {
  const uint32_t bits = Bits(value);
  return (bits & 0x7f800000u) == 0 ? FromBits(bits & 0x80000000u) : value;
}
float AddFlushing(float a, float b) { return Flush(Flush(a) + Flush(b)); }

// Round to nearest even; a NaN stays a NaN.
uint16_t RoundToBf16(float value) {
  uint32_t bits = Bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  bits += 0x7fffu + ((bits >> 16) & 1);
  return static_cast<uint16_t>(bits >> 16);
}

float Load(const Sizes& sizes, const uint8_t* vector, uint32_t element) {
  if (!sizes.bf16) return FromBits(reinterpret_cast<const uint32_t*>(vector)[element]);
  return FromBits(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(vector)[element]) << 16);
}
void Store(const Sizes& sizes, uint8_t* vector, uint32_t element, float value) {
  if (sizes.bf16) {
    reinterpret_cast<uint16_t*>(vector)[element] = RoundToBf16(value);
  } else {
    reinterpret_cast<float*>(vector)[element] = value;
  }
}
float Round(const Sizes& sizes, float value) {
  if (!sizes.bf16) return value;
  return FromBits(static_cast<uint32_t>(RoundToBf16(value)) << 16);
}

// A sum that starts from its first term; without terms it is +0.
struct Sum {
  float value = 0.0f;
  bool any = false;
  void Add(float term) {
    value = any ? AddFlushing(value, term) : term;
    any = true;
  }
};

uint64_t AlignRows(uint64_t rows, uint32_t alignment) {
  return (rows + alignment - 1) / alignment * alignment;
}

// The largest cap c with sum(align(min(n, c))) <= capacity, by trying them all downwards from the
// largest n.
uint32_t Cap(const Sizes& sizes, const std::vector<uint32_t>& wanted) {
  uint32_t cap = *std::max_element(wanted.begin(), wanted.end());
  for (;; cap--) {
    uint64_t rows = 0;
    for (uint32_t n : wanted) rows += AlignRows(std::min(n, cap), sizes.alignment);
    if (rows <= sizes.capacity || cap == 0) return cap;
  }
}

// The rows of one rank: its experts in order, each one's ids in (source, token, k) order.
void PlaceRank(const Sizes& sizes, uint32_t rank, PlanArrays& plan) {
  const uint32_t ids = sizes.tokens * sizes.topk;
  const uint32_t local = sizes.local_experts();
  std::vector<std::vector<uint32_t>> codes(local);
  for (uint32_t code = 0; code < sizes.ranks * ids; code++) {
    const int32_t expert = plan.expert_ids[code];
    if (expert >= 0 && expert / local == rank) codes[expert % local].push_back(code);
  }
  std::vector<uint32_t> wanted;
  for (const auto& list : codes) wanted.push_back(static_cast<uint32_t>(list.size()));
  const uint32_t cap = Cap(sizes, wanted);
  uint64_t first = 0;
  for (uint32_t expert = 0; expert < local; expert++) {
    const uint32_t kept = std::min(wanted[expert], cap);
    for (uint32_t i = 0; i < kept; i++) {
      const uint32_t code = codes[expert][i];
      plan.positions[code] = static_cast<int32_t>(first + i);
      plan.arrivals[static_cast<size_t>(rank) * sizes.ranks * ids + code] = plan.positions[code];
      plan.sources[static_cast<size_t>(rank) * sizes.capacity + first + i] =
          static_cast<int32_t>(code);
    }
    const uint32_t global = rank * local + expert;
    plan.group_sizes[global] = static_cast<int32_t>(kept);
    plan.padded_group_sizes[global] = static_cast<int32_t>(AlignRows(kept, sizes.alignment));
    plan.dropped[global] = static_cast<int32_t>(wanted[expert] - kept);
    first += AlignRows(kept, sizes.alignment);
  }
}

// y of one element of one token: partial sums per rank, then per node, then over all.
float CombineElement(const Sizes& sizes, const PlanArrays& plan, const std::vector<uint8_t>& rows,
                     size_t token, uint32_t element) {
  const uint32_t per_node = sizes.ranks / sizes.nodes;
  Sum total;
  for (uint32_t node = 0; node < sizes.nodes; node++) {
    Sum node_sum;
    for (uint32_t rank = node * per_node; rank < (node + 1) * per_node; rank++) {
      Sum partial;
      for (uint32_t k = 0; k < sizes.topk; k++) {
        const size_t code = token * sizes.topk + k;
        if (plan.positions[code] < 0) continue;
        if (plan.expert_ids[code] / sizes.local_experts() != rank) continue;
        const size_t row = static_cast<size_t>(rank) * sizes.capacity + plan.positions[code];
        partial.Add(Load(sizes, rows.data() + row * sizes.payload_bytes(), element));
      }
      if (partial.any) node_sum.Add(Round(sizes, partial.value));
    }
    if (!node_sum.any) continue;
    total.Add(sizes.nodes > 1 ? Round(sizes, node_sum.value) : node_sum.value);
  }
  return total.value;
}

}  // namespace

uint32_t WorstCapacity(const Sizes& sizes) {
  const uint64_t rows = static_cast<uint64_t>(sizes.ranks) * sizes.tokens *
                        std::min(sizes.topk, sizes.local_experts());
  // Duplicate experts within a token can exceed the minimum above: use the true worst case, topk a
  // token.
  const uint64_t duplicates = static_cast<uint64_t>(sizes.ranks) * sizes.tokens * sizes.topk;
  const uint64_t slack = static_cast<uint64_t>(sizes.local_experts()) * (sizes.alignment - 1);
  return static_cast<uint32_t>(AlignRows(std::max(rows, duplicates) + slack, sizes.alignment));
}

PlanArrays OraclePlan(const Sizes& sizes, const std::vector<int32_t>& expert_ids) {
  const size_t ids = static_cast<size_t>(sizes.ranks) * sizes.tokens * sizes.topk;
  PlanArrays plan;
  plan.expert_ids = expert_ids;
  plan.positions.assign(ids, -1);
  plan.sources.assign(static_cast<size_t>(sizes.ranks) * sizes.capacity, -1);
  plan.arrivals.assign(ids * sizes.ranks, -1);
  plan.group_sizes.assign(sizes.experts, 0);
  plan.padded_group_sizes.assign(sizes.experts, 0);
  plan.dropped.assign(sizes.experts, 0);
  plan.invalid.assign(sizes.ranks, 0);
  for (size_t code = 0; code < ids; code++) {
    int32_t& id = plan.expert_ids[code];
    if (id < -1 || id >= static_cast<int32_t>(sizes.experts)) {
      plan.invalid[code / (sizes.tokens * sizes.topk)]++;
      id = -1;
    }
  }
  for (uint32_t rank = 0; rank < sizes.ranks; rank++) PlaceRank(sizes, rank, plan);
  return plan;
}

void OracleDispatch(const Sizes& sizes, const PlanArrays& plan, const std::vector<uint8_t>& x,
                    const std::vector<float>& s, std::vector<uint8_t>& rows,
                    std::vector<float>& row_s) {
  const size_t bytes = sizes.payload_bytes();
  for (uint32_t rank = 0; rank < sizes.ranks; rank++) {
    uint64_t used = 0;
    for (uint32_t e = 0; e < sizes.local_experts(); e++) {
      used += plan.padded_group_sizes[rank * sizes.local_experts() + e];
    }
    for (uint32_t position = 0; position < sizes.capacity; position++) {
      const size_t row = static_cast<size_t>(rank) * sizes.capacity + position;
      const int32_t code = plan.sources[row];
      if (code >= 0) {
        std::memcpy(rows.data() + row * bytes, x.data() + code / sizes.topk * bytes, bytes);
        row_s[row] = s[code];
      } else if (position < used || sizes.zero_tail) {
        std::memset(rows.data() + row * bytes, 0, bytes);
        row_s[row] = 0.0f;
      }
    }
  }
}

void OracleCombine(const Sizes& sizes, const PlanArrays& plan, const std::vector<uint8_t>& rows,
                   const std::vector<float>& row_s, std::vector<uint8_t>& y,
                   std::vector<float>& s) {
  const size_t tokens = static_cast<size_t>(sizes.ranks) * sizes.tokens;
  for (size_t token = 0; token < tokens; token++) {
    for (uint32_t k = 0; k < sizes.topk; k++) {
      const size_t code = token * sizes.topk + k;
      const int32_t position = plan.positions[code];
      s[code] = 0.0f;
      if (position < 0) continue;
      const size_t rank = plan.expert_ids[code] / sizes.local_experts();
      s[code] = row_s[rank * sizes.capacity + position];
    }
    for (uint32_t element = 0; element < sizes.hidden; element++) {
      Store(sizes, y.data() + token * sizes.payload_bytes(), element,
            CombineElement(sizes, plan, rows, token, element));
    }
  }
}

}  // namespace harness
