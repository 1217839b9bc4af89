#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "cpu_blocks.h"
#include "cpu_sums.h"

namespace jax_moe {
namespace {

// Operands rows, row_s, expert_ids, positions; results y, s. Each token pulls its rows by its own
// positions, in ranges of tokens.
class CombineOperation final : public Operation {
 public:
  CombineOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices)
      : spec_(spec), blocks_(spec, std::move(devices)) {
    blocks_.PrepareResult(0, spec_.tokens * spec_.row_bytes());
    const int64_t item_bytes = (spec_.row_bytes() + sizeof(float)) * (spec_.top_k + 1);
    for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) {
      Split(rank, 0, spec_.tokens, item_bytes, ranges_);
    }
  }

  int64_t num_chunks(int) const override { return static_cast<int64_t>(ranges_.size()); }

  void Run(int, int64_t chunk) override {
    const FlushSubnormals flush;
    const Range range = ranges_[chunk];
    const int64_t row_bytes = spec_.row_bytes();
    char* y = blocks_.ret<char>(0, range.rank, spec_.tokens * row_bytes);
    std::vector<Term> terms;
    terms.reserve(spec_.top_k);
    for (int64_t token = range.begin; token < range.end && !failed(); ++token) {
      terms.clear();
      Gather(range.rank, token, terms);
      Sum(terms, y + token * row_bytes);
    }
  }

 private:
  // Copies the token's `s` and lists its rows in the order of summation.
  void Gather(int64_t rank, int64_t token, std::vector<Term>& terms) {
    const int64_t slots = spec_.tokens * spec_.top_k;
    const int64_t first = token * spec_.top_k;
    const int32_t* ids = blocks_.arg<int32_t>(2, rank, slots) + first;
    const int32_t* positions = blocks_.arg<int32_t>(3, rank, slots) + first;
    float* s = blocks_.ret<float>(1, rank, slots) + first;
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      s[k] = 0.0f;
      if (positions[k] < 0) continue;
      if (ids[k] < 0 || ids[k] >= spec_.num_experts || positions[k] >= spec_.capacity) {
        Fail(Join(ToString(spec_), ": token ", token, ", k ", k, " of rank ", rank,
                  " has expert id ", ids[k], " and position ", positions[k],
                  ", out of range; pass the plan that jax_moe.plan returned"));
        return;
      }
      const int64_t at = ids[k] / spec_.experts_per_rank();
      s[k] = blocks_.arg<float>(1, at, spec_.capacity)[positions[k]];
      const char* rows = blocks_.arg<char>(0, at, spec_.capacity * spec_.row_bytes());
      Insert({rows + positions[k] * spec_.row_bytes(), at, at / spec_.ranks_per_node()}, terms);
    }
  }

  // Keeps ascending ranks, and ascending k within a rank.
  static void Insert(Term term, std::vector<Term>& terms) {
    auto at = terms.end();
    while (at != terms.begin() && std::prev(at)->rank > term.rank) --at;
    terms.insert(at, term);
  }

  void Sum(const std::vector<Term>& terms, char* out) const {
    const auto num_terms = static_cast<int64_t>(terms.size());
    if (num_terms == 0) {
      std::memset(out, 0, spec_.row_bytes());
    } else if (num_terms == 1) {
      std::memcpy(out, terms[0].row, spec_.row_bytes());
    } else if (spec_.payload == PayloadType::kBFloat16) {
      SumBFloat16(terms.data(), num_terms, spec_.hidden, out);
    } else {
      SumFloat32(terms.data(), num_terms, spec_.hidden, out);
    }
  }

  CallSpec spec_;
  Blocks blocks_;
  std::vector<Range> ranges_;
};

}  // namespace

std::unique_ptr<Operation> MakeCombine(const CallSpec& spec, std::vector<DeviceBuffers> devices) {
  return std::make_unique<CombineOperation>(spec, std::move(devices));
}

}  // namespace jax_moe
