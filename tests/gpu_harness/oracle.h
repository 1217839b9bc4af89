// The specification of plan, dispatch and combine in plain C++ on arrays stacked over all ranks.
//
// Written from the specification alone, without regard to the kernels: loops over ranks, tokens and
// choices.
#ifndef JAX_MOE_TESTS_GPU_HARNESS_ORACLE_H_
#define JAX_MOE_TESTS_GPU_HARNESS_ORACLE_H_

#include <cstdint>
#include <vector>

namespace harness {

struct Sizes {
  uint32_t ranks, nodes, tokens, topk, experts, capacity, alignment, hidden;
  bool bf16, zero_tail;
  uint32_t local_experts() const { return experts / ranks; }
  uint32_t item_bytes() const { return bf16 ? 2 : 4; }
  uint32_t payload_bytes() const { return hidden * item_bytes(); }
};

// Stacked over ranks: [ranks, ...].
struct PlanArrays {
  std::vector<int32_t> expert_ids;          // [ranks, tokens, topk]
  std::vector<int32_t> positions;           // [ranks, tokens, topk]
  std::vector<int32_t> sources;             // [ranks, capacity]
  std::vector<int32_t> arrivals;            // [ranks, ranks, tokens, topk]
  std::vector<int32_t> group_sizes;         // [experts]
  std::vector<int32_t> padded_group_sizes;  // [experts]
  std::vector<int32_t> dropped;             // [experts]
  std::vector<int32_t> invalid;             // [ranks]
};

// Capacity that never drops: ranks * tokens * min(topk, local experts), and slack for the
// alignment.
uint32_t WorstCapacity(const Sizes& sizes);

PlanArrays OraclePlan(const Sizes& sizes, const std::vector<int32_t>& expert_ids);

// rows and row_s start as `rows`/`row_s` (the poison): what the specification leaves undefined
// keeps it.
void OracleDispatch(const Sizes& sizes, const PlanArrays& plan, const std::vector<uint8_t>& x,
                    const std::vector<float>& s, std::vector<uint8_t>& rows,
                    std::vector<float>& row_s);

void OracleCombine(const Sizes& sizes, const PlanArrays& plan, const std::vector<uint8_t>& rows,
                   const std::vector<float>& row_s, std::vector<uint8_t>& y, std::vector<float>& s);

}  // namespace harness

#endif  // JAX_MOE_TESTS_GPU_HARNESS_ORACLE_H_
