// The operations stated naively: every row sought for by looking at all tokens of all ranks.

#ifndef JAX_MOE_TESTS_ORACLE_H_
#define JAX_MOE_TESTS_ORACLE_H_

#include <cstdint>
#include <vector>

#include "cpu_operations.h"

namespace jax_moe::oracle {

// Everything by global rank; payloads as bytes of spec.payload.
struct Plan {
  std::vector<std::vector<int32_t>> expert_ids, positions;                     // [R][T*K]
  std::vector<std::vector<int32_t>> sources;                                   // [R][C]
  std::vector<std::vector<int32_t>> group_sizes, padded_group_sizes, dropped;  // [R][E/R]
  std::vector<int32_t> invalid;                                                // [R]
};

using Payload = std::vector<uint32_t>;  // one element's bits each, whatever the type
using Scalars = std::vector<float>;

Plan MakePlan(const CallSpec& spec, const std::vector<std::vector<int32_t>>& expert_ids);

// rows [R][C*H] and row_s [R][C]; rows of the tail are zero.
void Dispatch(const CallSpec& spec, const Plan& plan, const std::vector<Payload>& x,
              const std::vector<Scalars>& s, std::vector<Payload>& rows,
              std::vector<Scalars>& row_s);

// y [R][T*H] and s [R][T*K].
void Combine(const CallSpec& spec, const Plan& plan, const std::vector<Payload>& rows,
             const std::vector<Scalars>& row_s, std::vector<Payload>& y, std::vector<Scalars>& s);

// Bits of the payload type of a float that it can represent or that is to be rounded to it.
uint32_t ToBits(PayloadType type, float value);
float FromBits(PayloadType type, uint32_t bits);

}  // namespace jax_moe::oracle

#endif  // JAX_MOE_TESTS_ORACLE_H_
