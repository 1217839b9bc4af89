#include "oracle.h"

#include <bit>
#include <cmath>
#include <limits>
#include <optional>

namespace jax_moe::oracle {
namespace {

float Flush(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

// A sum at one level: one term passes as it is, more are added from the first on and rounded.
class Sum {
 public:
  explicit Sum(PayloadType type) : type_(type) {}

  void Add(uint32_t bits) {
    if (num_terms_++ == 0) {
      bits_ = bits;
      value_ = FromBits(type_, bits);
      return;
    }
    value_ = Flush(Flush(value_) + Flush(FromBits(type_, bits)));
    bits_ = ToBits(type_, value_);
  }

  std::optional<uint32_t> bits() const {
    return num_terms_ == 0 ? std::nullopt : std::optional(bits_);
  }

 private:
  PayloadType type_;
  int num_terms_ = 0;
  float value_ = 0;    // not rounded
  uint32_t bits_ = 0;  // rounded
};

int64_t RoundUp(int64_t value, int64_t multiple) {
  while (value % multiple != 0) ++value;
  return value;
}

// The largest cap that fits, by trying them from below.
int64_t Cap(const CallSpec& spec, const std::vector<int64_t>& counts) {
  int64_t most = 0;
  for (int64_t count : counts) most = std::max(most, count);
  int64_t cap = 0;
  for (int64_t attempt = 0; attempt <= most; ++attempt) {
    int64_t rows = 0;
    for (int64_t count : counts) rows += RoundUp(std::min(count, attempt), spec.alignment);
    if (rows <= spec.capacity) cap = attempt;
  }
  return cap;
}

}  // namespace

uint32_t ToBits(PayloadType type, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (type == PayloadType::kFloat32) return bits;
  if (std::isnan(value)) return (bits >> 16) | 0x40;
  const double low = std::bit_cast<float>(bits & 0xffff0000u);
  const uint32_t up_bits = (bits & 0xffff0000u) + 0x10000u;
  // The neighbour above the largest finite number is infinity; it counts as 2^128 here.
  const double up = (up_bits & 0x7fffffffu) == 0x7f800000u
                        ? std::copysign(std::ldexp(1.0, 128), value)
                        : std::bit_cast<float>(up_bits);
  const double to_low = std::fabs(value - low);
  const double to_up = std::fabs(up - value);
  const bool low_is_even = (bits >> 16) % 2 == 0;
  const bool take_low = std::isinf(value) || to_low < to_up || (to_low == to_up && low_is_even);
  return take_low ? bits >> 16 : up_bits >> 16;
}

float FromBits(PayloadType type, uint32_t bits) {
  return std::bit_cast<float>(type == PayloadType::kFloat32 ? bits : bits << 16);
}

Plan MakePlan(const CallSpec& spec, const std::vector<std::vector<int32_t>>& expert_ids) {
  const int64_t num_slots = spec.tokens * spec.top_k;
  Plan plan;
  plan.expert_ids = expert_ids;
  plan.positions.assign(spec.num_ranks, std::vector<int32_t>(num_slots, -1));
  plan.sources.assign(spec.num_ranks, std::vector<int32_t>(spec.capacity, -1));
  for (auto& ids : plan.expert_ids) {
    int32_t invalid = 0;
    for (int32_t& id : ids) {
      if (id < -1 || id >= spec.num_experts) ++invalid;
      if (id < 0 || id >= spec.num_experts) id = -1;
    }
    plan.invalid.push_back(invalid);
  }
  for (int64_t rank = 0; rank < spec.num_ranks; ++rank) {
    std::vector<int64_t> counts(spec.experts_per_rank(), 0);
    for (const auto& ids : plan.expert_ids) {
      for (int32_t id : ids) {
        if (id >= 0 && id / spec.experts_per_rank() == rank) ++counts[id % counts.size()];
      }
    }
    const int64_t cap = Cap(spec, counts);
    int64_t row = 0;
    std::vector<int32_t> sizes, padded, dropped;
    for (size_t e = 0; e < counts.size(); ++e) {
      const int64_t start = row;
      int64_t seen = 0;
      for (int64_t source = 0; source < spec.num_ranks; ++source) {
        for (int64_t i = 0; i < num_slots; ++i) {
          const int64_t expert = rank * spec.experts_per_rank() + static_cast<int64_t>(e);
          if (plan.expert_ids[source][i] != expert || seen++ >= cap) continue;
          plan.positions[source][i] = static_cast<int32_t>(row);
          plan.sources[rank][row++] = static_cast<int32_t>(source * num_slots + i);
        }
      }
      sizes.push_back(static_cast<int32_t>(row - start));
      dropped.push_back(static_cast<int32_t>(counts[e] - (row - start)));
      row = start + RoundUp(row - start, spec.alignment);
      padded.push_back(static_cast<int32_t>(row - start));
    }
    plan.group_sizes.push_back(sizes);
    plan.padded_group_sizes.push_back(padded);
    plan.dropped.push_back(dropped);
  }
  return plan;
}

void Dispatch(const CallSpec& spec, const Plan& plan, const std::vector<Payload>& x,
              const std::vector<Scalars>& s, std::vector<Payload>& rows,
              std::vector<Scalars>& row_s) {
  rows.assign(spec.num_ranks, Payload(spec.capacity * spec.hidden, 0));
  row_s.assign(spec.num_ranks, Scalars(spec.capacity, 0.0f));
  for (int64_t source = 0; source < spec.num_ranks; ++source) {
    for (int64_t i = 0; i < spec.tokens * spec.top_k; ++i) {
      const int64_t position = plan.positions[source][i];
      if (position < 0) continue;
      const int64_t rank = plan.expert_ids[source][i] / spec.experts_per_rank();
      row_s[rank][position] = s[source][i];
      for (int64_t h = 0; h < spec.hidden; ++h) {
        rows[rank][position * spec.hidden + h] = x[source][i / spec.top_k * spec.hidden + h];
      }
    }
  }
}

void Combine(const CallSpec& spec, const Plan& plan, const std::vector<Payload>& rows,
             const std::vector<Scalars>& row_s, std::vector<Payload>& y, std::vector<Scalars>& s) {
  y.assign(spec.num_ranks, Payload(spec.tokens * spec.hidden, 0));
  s.assign(spec.num_ranks, Scalars(spec.tokens * spec.top_k, 0.0f));
  for (int64_t own = 0; own < spec.num_ranks; ++own) {
    for (int64_t i = 0; i < spec.tokens * spec.hidden; ++i) {
      const int64_t first = i / spec.hidden * spec.top_k;
      Sum total(spec.payload);
      for (int64_t node = 0; node < spec.num_nodes; ++node) {
        Sum node_sum(spec.payload);
        for (int64_t rank = node * spec.ranks_per_node(); rank < (node + 1) * spec.ranks_per_node();
             ++rank) {
          Sum partial(spec.payload);
          for (int64_t k = first; k < first + spec.top_k; ++k) {
            const int64_t position = plan.positions[own][k];
            if (position < 0 || plan.expert_ids[own][k] / spec.experts_per_rank() != rank) continue;
            partial.Add(rows[rank][position * spec.hidden + i % spec.hidden]);
            s[own][k] = row_s[rank][position];
          }
          if (partial.bits().has_value()) node_sum.Add(*partial.bits());
        }
        if (node_sum.bits().has_value()) total.Add(*node_sum.bits());
      }
      y[own][i] = total.bits().value_or(0);
    }
  }
}

}  // namespace jax_moe::oracle
