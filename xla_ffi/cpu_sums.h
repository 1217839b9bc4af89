// The order of summation of combine, for one token.

#ifndef JAX_MOE_CPU_SUMS_H_
#define JAX_MOE_CPU_SUMS_H_

#include <cstdint>

namespace jax_moe {

// One row of a token, at the rank and node of its expert.
struct Term {
  const void* row;
  int64_t rank;
  int64_t node;
};

// Writes the sum of `terms` (ascending rank, within a rank ascending k; num_terms >= 2) to `out`:
// rows of one rank first, then the ranks of one node, then the nodes; each level adds in fp32 and
// is rounded to the payload type; a level with one term passes its bits on. Subnormals flush only
// while a FlushSubnormals lives.
void SumFloat32(const Term* terms, int64_t num_terms, int64_t hidden, void* out);
void SumBFloat16(const Term* terms, int64_t num_terms, int64_t hidden, void* out);

// While one lives, additions of this thread take subnormal inputs as zero and flush subnormal
// results to zero, sign kept (the flags belong to the thread, and are put back).
class FlushSubnormals {
 public:
  FlushSubnormals();
  ~FlushSubnormals();
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_SUMS_H_
