#include "world.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"

namespace jax_moe {
namespace {

// Ordinary numbers, and now and then the awkward ones.
float RandomValue(std::mt19937& random) {
  switch (random() % 16) {
    case 0:
      return std::bit_cast<float>(static_cast<uint32_t>(random() % 0x800000u) |
                                  (static_cast<uint32_t>(random() % 2) << 31));  // subnormal
    case 1:
      return random() % 2 ? -0.0f : 0.0f;
    case 2:
      return random() % 64 ? 1e-38f : std::numeric_limits<float>::infinity();
    case 3:
      return random() % 64 ? -1.1e-38f : std::numeric_limits<float>::quiet_NaN();
    default:
      // All bits of the mantissa, so that the order of a sum shows.
      return std::ldexp(static_cast<float>(random() % (1 << 24)) - 0x7fffffp0f,
                        static_cast<int>(random() % 8) - 24);
  }
}

oracle::Payload RandomPayload(PayloadType type, int64_t size, std::mt19937& random) {
  oracle::Payload payload(size);
  for (uint32_t& bits : payload) bits = oracle::ToBits(type, RandomValue(random));
  return payload;
}

oracle::Scalars RandomScalars(int64_t size, std::mt19937& random) {
  oracle::Scalars scalars(size);
  for (float& scalar : scalars) scalar = RandomValue(random);
  return scalars;
}

int32_t RandomId(Routing routing, int64_t num_experts, std::mt19937& random) {
  const auto experts = static_cast<int32_t>(num_experts);
  switch (routing) {
    case Routing::kRandom:
      return static_cast<int32_t>(random() % (experts + 1)) - 1;
    case Routing::kOneExpert:
      return experts - 1;
    case Routing::kNone:
      return -1;
    case Routing::kOutOfRange:
      return static_cast<int32_t>(random() % (3 * experts)) - experts;
  }
  return -1;
}

bool IsNan(float value) { return std::isnan(value); }
bool IsNan(int32_t) { return false; }

}  // namespace

World::World(CallSpec spec, Routing routing, uint32_t seed) : spec_(spec) {
  std::mt19937 random(seed);
  const int64_t slots = spec.tokens * spec.top_k;
  std::vector<std::vector<int32_t>> ids(spec.num_ranks, std::vector<int32_t>(slots));
  std::vector<oracle::Payload> x, rows, want_rows, want_y;
  std::vector<oracle::Scalars> s, row_s, want_row_s, want_s;
  for (int64_t rank = 0; rank < spec.num_ranks; ++rank) {
    for (int32_t& id : ids[rank]) id = RandomId(routing, spec.num_experts, random);
    x.push_back(RandomPayload(spec.payload, spec.tokens * spec.hidden, random));
    s.push_back(RandomScalars(slots, random));
    rows.push_back(RandomPayload(spec.payload, spec.capacity * spec.hidden, random));
    row_s.push_back(RandomScalars(spec.capacity, random));
  }
  const oracle::Plan plan = oracle::MakePlan(spec, ids);
  oracle::Dispatch(spec, plan, x, s, want_rows, want_row_s);
  oracle::Combine(spec, plan, rows, row_s, want_y, want_s);
  Blocks<int32_t> invalid;
  for (int32_t count : plan.invalid) invalid.push_back({count});

  ids_ = Merge(ids);
  want_ids_ = got_ids_ = Merge(plan.expert_ids);
  want_positions_ = got_positions_ = Merge(plan.positions);
  want_sources_ = got_sources_ = Merge(plan.sources);
  want_sizes_ = got_sizes_ = Merge(plan.group_sizes);
  want_padded_ = got_padded_ = Merge(plan.padded_group_sizes);
  want_dropped_ = got_dropped_ = Merge(plan.dropped);
  want_invalid_ = got_invalid_ = Merge(invalid);
  x_ = Pack(x);
  s_ = Merge(s);
  rows_ = Pack(rows);
  row_s_ = Merge(row_s);
  want_rows_ = got_rows_ = Pack(want_rows);
  want_row_s_ = got_row_s_ = Merge(want_row_s);
  want_y_ = got_y_ = Pack(want_y);
  want_s_ = got_s_ = Merge(want_s);
}

template <typename T>
World::Blocks<T> World::Merge(const Blocks<T>& by_rank) const {
  Blocks<T> merged(spec_.num_devices());
  for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) {
    auto& block = merged[rank / spec_.virtual_ranks];
    block.insert(block.end(), by_rank[rank].begin(), by_rank[rank].end());
  }
  return merged;
}

World::Blocks<char> World::Pack(const std::vector<oracle::Payload>& by_rank) const {
  Blocks<char> merged(spec_.num_devices());
  for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) {
    auto& block = merged[rank / spec_.virtual_ranks];
    for (uint32_t bits : by_rank[rank]) {
      for (int64_t i = 0; i < spec_.element_bytes(); ++i) {
        block.push_back(static_cast<char>(bits >> (8 * i)));
      }
    }
  }
  return merged;
}

CallSpec World::Spec(OperationKind kind) const {
  CallSpec spec = spec_;
  spec.kind = kind;
  if (kind == OperationKind::kPlan) {
    spec.payload = PayloadType::kNone;
    spec.hidden = 0;
  }
  return spec;
}

DeviceBuffers World::Buffers(OperationKind kind, int64_t d) {
  DeviceBuffers buffers;
  switch (kind) {
    case OperationKind::kPlan:
      buffers.args = {ids_[d].data()};
      buffers.rets = {got_ids_[d].data(),    got_positions_[d].data(), got_sources_[d].data(),
                      got_sizes_[d].data(),  got_padded_[d].data(),    got_dropped_[d].data(),
                      got_invalid_[d].data()};
      break;
    case OperationKind::kDispatch:
      buffers.args = {x_[d].data(), s_[d].data(), want_sources_[d].data(), want_padded_[d].data()};
      buffers.rets = {got_rows_[d].data(), got_row_s_[d].data()};
      break;
    case OperationKind::kCombine:
      buffers.args = {rows_[d].data(), row_s_[d].data(), want_ids_[d].data(),
                      want_positions_[d].data()};
      buffers.rets = {got_y_[d].data(), got_s_[d].data()};
      break;
  }
  return buffers;
}

std::vector<DeviceBuffers> World::AllBuffers(OperationKind kind) {
  std::vector<DeviceBuffers> all;
  for (int64_t d = 0; d < spec_.num_devices(); ++d) all.push_back(Buffers(kind, d));
  return all;
}

void World::Poison(OperationKind kind) {
  const auto poison = [](auto& blocks) {
    for (auto& block : blocks) {
      if (!block.empty()) std::memset(block.data(), 0x7b, block.size() * sizeof(block[0]));
    }
  };
  if (kind == OperationKind::kPlan) {
    for (auto* blocks : {&got_ids_, &got_positions_, &got_sources_, &got_sizes_, &got_padded_,
                         &got_dropped_, &got_invalid_}) {
      poison(*blocks);
    }
  } else if (kind == OperationKind::kDispatch) {
    poison(got_rows_);
    poison(got_row_s_);
  } else {
    poison(got_y_);
    poison(got_s_);
  }
}

template <typename T>
void World::CheckEqual(const char* name, const Blocks<T>& got, const Blocks<T>& want,
                       const std::string& what) const {
  for (size_t d = 0; d < want.size(); ++d) {
    for (size_t i = 0; i < want[d].size(); ++i) {
      const bool both_nan = IsNan(got[d][i]) && IsNan(want[d][i]);
      CHECK_THAT(both_nan || std::memcmp(&got[d][i], &want[d][i], sizeof(T)) == 0,
                 what << ": " << name << " of device " << d << " at " << i << " is " << got[d][i]
                      << ", not " << want[d][i] << "; " << ToString(spec_));
    }
  }
}

// Copies keep every bit, and the rows of a tail that is not zeroed stay as they were.
void World::CheckRows(const std::string& what) const {
  const int64_t row_bytes = spec_.row_bytes();
  for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) {
    const int64_t d = rank / spec_.virtual_ranks;
    const int64_t v = rank % spec_.virtual_ranks;
    int64_t end = 0;
    for (int64_t e = 0; e < spec_.experts_per_rank(); ++e) {
      end += want_padded_[d][v * spec_.experts_per_rank() + e];
    }
    for (int64_t row = v * spec_.capacity; row < (v + 1) * spec_.capacity; ++row) {
      const bool defined = spec_.zero_tail || row < v * spec_.capacity + end;
      const std::string poison(row_bytes, 0x7b);
      const char* want = defined ? &want_rows_[d][row * row_bytes] : poison.data();
      CHECK_THAT(std::memcmp(&got_rows_[d][row * row_bytes], want, row_bytes) == 0,
                 what << ": rows of device " << d << ", row " << row << "; " << ToString(spec_));
      float want_s = want_row_s_[d][row];
      if (!defined) std::memset(&want_s, 0x7b, sizeof want_s);
      CHECK_THAT(std::memcmp(&got_row_s_[d][row], &want_s, sizeof want_s) == 0,
                 what << ": row_s of device " << d << ", row " << row << "; " << ToString(spec_));
    }
  }
}

void World::CheckY(const std::string& what) const {
  const int64_t bytes = spec_.element_bytes();
  const auto value = [&](const std::vector<char>& block, size_t i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &block[i], bytes);
    return bits;
  };
  for (size_t d = 0; d < want_y_.size(); ++d) {
    for (size_t i = 0; i < want_y_[d].size(); i += bytes) {
      const uint32_t got = value(got_y_[d], i);
      const uint32_t want = value(want_y_[d], i);
      const bool both_nan = std::isnan(oracle::FromBits(spec_.payload, got)) &&
                            std::isnan(oracle::FromBits(spec_.payload, want));
      CHECK_THAT(both_nan || got == want, what << ": y of device " << d << ", element " << i / bytes
                                               << " has bits " << std::hex << got << ", not "
                                               << want << "; " << ToString(spec_));
    }
  }
}

void World::CheckResults(OperationKind kind, const std::string& what) const {
  if (kind == OperationKind::kPlan) {
    CheckEqual("expert_ids", got_ids_, want_ids_, what);
    CheckEqual("positions", got_positions_, want_positions_, what);
    CheckEqual("sources", got_sources_, want_sources_, what);
    CheckEqual("group_sizes", got_sizes_, want_sizes_, what);
    CheckEqual("padded_group_sizes", got_padded_, want_padded_, what);
    CheckEqual("dropped", got_dropped_, want_dropped_, what);
    CheckEqual("invalid", got_invalid_, want_invalid_, what);
  } else if (kind == OperationKind::kDispatch) {
    CheckRows(what);
  } else {
    CheckY(what);
    CheckEqual("s", got_s_, want_s_, what);
  }
}

}  // namespace jax_moe
