#include "cpu_operations.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>
#include <utility>

#include "cpu_sums.h"

namespace jax_moe {

const char* OperationName(OperationKind kind) {
  switch (kind) {
    case OperationKind::kPlan:
      return "jax_moe_plan";
    case OperationKind::kDispatch:
      return "jax_moe_dispatch";
    case OperationKind::kCombine:
      return "jax_moe_combine";
  }
  return "jax_moe";
}

std::string ToString(const CallSpec& spec) {
  const char* payload = spec.payload == PayloadType::kNone      ? ""
                        : spec.payload == PayloadType::kFloat32 ? "float32, "
                                                                : "bfloat16, ";
  std::ostringstream out;
  out << OperationName(spec.kind) << "(" << payload << "ranks=" << spec.num_ranks
      << ", virtual_ranks=" << spec.virtual_ranks << ", nodes=" << spec.num_nodes
      << ", experts=" << spec.num_experts << ", tokens=" << spec.tokens
      << ", top_k=" << spec.top_k << ", hidden=" << spec.hidden << ", capacity=" << spec.capacity
      << ", alignment=" << spec.alignment << ", zero_tail=" << spec.zero_tail
      << ", group=" << spec.group_key << ")";
  return out.str();
}

std::string Check(const CallSpec& spec) {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  std::string wrong;
  const auto require = [&](bool holds, const char* rule) {
    if (!holds && wrong.empty()) wrong = ToString(spec) + ": " + rule;
  };
  require(spec.num_ranks >= 1 && spec.virtual_ranks >= 1 && spec.num_nodes >= 1 &&
              spec.num_experts >= 1 && spec.alignment >= 1,
          "ranks, virtual_ranks, nodes, experts and alignment must be at least 1");
  if (!wrong.empty()) return wrong;
  require(spec.num_ranks % spec.virtual_ranks == 0, "virtual_ranks must divide ranks");
  require(spec.num_ranks % spec.num_nodes == 0, "nodes must divide ranks");
  require(spec.num_experts % spec.num_ranks == 0, "ranks must divide experts");
  require(spec.zero_tail == 0 || spec.zero_tail == 1, "zero_tail must be 0 or 1");
  require(spec.capacity <= kMaxInt32, "capacity must be below 2^31 rows, as positions are int32");
  require(spec.tokens == 0 || spec.top_k == 0 ||
              spec.num_ranks <= kMaxInt32 / spec.tokens / spec.top_k,
          "ranks * tokens * top_k must be below 2^31, as sources are int32");
  return wrong;
}

void Operation::Fail(std::string message) {
  std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = std::move(message);
  failed_.store(true, std::memory_order_relaxed);
}

namespace {

// Bytes that one chunk reads and writes, about: small enough to spread evenly over the threads,
// large enough to drown the handing out.
constexpr int64_t kChunkBytes = 256 * 1024;

template <typename... Values>
std::string Join(const Values&... values) {
  std::ostringstream out;
  (out << ... << values);
  return out.str();
}

int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Finds a rank's block in the buffers of its device.
class Blocks {
 public:
  Blocks(const CallSpec& spec, std::vector<DeviceBuffers> devices)
      : virtual_ranks_(spec.virtual_ranks), devices_(std::move(devices)) {}

  // Block of rank `rank` in operand (result) `idx`, where each rank has `count` elements of T.
  template <typename T>
  const T* arg(int idx, int64_t rank, int64_t count) const {
    return static_cast<const T*>(devices_[rank / virtual_ranks_].args[idx]) +
           rank % virtual_ranks_ * count;
  }
  template <typename T>
  T* ret(int idx, int64_t rank, int64_t count) const {
    return static_cast<T*>(devices_[rank / virtual_ranks_].rets[idx]) +
           rank % virtual_ranks_ * count;
  }

 private:
  int64_t virtual_ranks_;
  std::vector<DeviceBuffers> devices_;
};

// A range of rows or tokens of one rank.
struct Range {
  int64_t rank;
  int64_t begin;
  int64_t end;
};

void Split(int64_t rank, int64_t begin, int64_t end, int64_t item_bytes, std::vector<Range>& out) {
  const int64_t step = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, item_bytes));
  for (; begin < end; begin += step) out.push_back({rank, begin, std::min(end, begin + step)});
}

// ---- plan -----------------------------------------------------------------------------------

// Operand: expert_ids. Results: in the order of the custom call.
enum PlanResult { kExpertIds, kPositions, kSources, kGroupSizes, kPaddedSizes, kDropped, kInvalid };

// Phase 0 counts each source rank's rows per expert; phase 1 lays out each expert rank's rows and
// turns the counts into first positions; phase 2 walks each source rank's (token, k) in order.
class PlanOperation final : public Operation {
 public:
  PlanOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices)
      : spec_(spec),
        blocks_(spec, std::move(devices)),
        next_(spec.num_ranks * spec.num_experts, 0),
        ends_(spec.num_experts, 0) {}

  int num_phases() const override { return 3; }
  int64_t num_chunks(int) const override { return spec_.num_ranks; }

  void Run(int phase, int64_t rank) override {
    if (phase == 0) CountRows(rank);
    if (phase == 1) LayOutRows(rank);
    if (phase == 2) PlaceRows(rank);
  }

 private:
  int64_t num_slots() const { return spec_.tokens * spec_.top_k; }

  void CountRows(int64_t source) {
    const int32_t* ids = blocks_.arg<int32_t>(0, source, num_slots());
    int32_t* valid_ids = blocks_.ret<int32_t>(kExpertIds, source, num_slots());
    int32_t* counts = &next_[source * spec_.num_experts];
    int32_t num_invalid = 0;
    for (int64_t i = 0; i < num_slots(); ++i) {
      const int32_t id = ids[i];
      const bool valid = id >= 0 && id < spec_.num_experts;
      valid_ids[i] = valid ? id : -1;
      if (valid) ++counts[id];
      num_invalid += !valid && id != -1;
    }
    *blocks_.ret<int32_t>(kInvalid, source, 1) = num_invalid;
  }

  // The largest cap per expert with which the padded groups fit into the capacity.
  int64_t FindCap(const std::vector<int64_t>& counts) const {
    const auto fits = [&](int64_t cap) {
      int64_t rows = 0;
      for (int64_t count : counts) rows += AlignUp(std::min(count, cap), spec_.alignment);
      return rows <= spec_.capacity;
    };
    int64_t low = 0;
    int64_t high = *std::max_element(counts.begin(), counts.end());
    while (low < high) {
      const int64_t middle = high - (high - low) / 2;
      if (fits(middle)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  void LayOutRows(int64_t rank) {
    const int64_t num_local = spec_.experts_per_rank();
    std::vector<int64_t> counts(num_local, 0);
    for (int64_t source = 0; source < spec_.num_ranks; ++source) {
      const int32_t* row = &next_[source * spec_.num_experts + rank * num_local];
      for (int64_t e = 0; e < num_local; ++e) counts[e] += row[e];
    }
    const int64_t cap = FindCap(counts);
    int32_t* sources = blocks_.ret<int32_t>(kSources, rank, spec_.capacity);
    int64_t start = 0;
    for (int64_t e = 0; e < num_local; ++e) {
      const int64_t kept = std::min(counts[e], cap);
      const int64_t padded = AlignUp(kept, spec_.alignment);
      blocks_.ret<int32_t>(kGroupSizes, rank, num_local)[e] = static_cast<int32_t>(kept);
      blocks_.ret<int32_t>(kPaddedSizes, rank, num_local)[e] = static_cast<int32_t>(padded);
      blocks_.ret<int32_t>(kDropped, rank, num_local)[e] = static_cast<int32_t>(counts[e] - kept);
      std::fill(sources + start + kept, sources + start + padded, -1);
      ends_[rank * num_local + e] = start + kept;
      TurnCountsIntoPositions(rank * num_local + e, start, start + kept);
      start += padded;
    }
    std::fill(sources + start, sources + spec_.capacity, -1);
  }

  // A dropped row's position is only compared with the end, so it is held there: int32 is enough.
  void TurnCountsIntoPositions(int64_t expert, int64_t start, int64_t end) {
    for (int64_t source = 0; source < spec_.num_ranks; ++source) {
      int32_t& next = next_[source * spec_.num_experts + expert];
      const int64_t count = next;
      next = static_cast<int32_t>(std::min(start, end));
      start += count;
    }
  }

  void PlaceRows(int64_t source) {
    const int32_t* ids = blocks_.ret<int32_t>(kExpertIds, source, num_slots());
    int32_t* positions = blocks_.ret<int32_t>(kPositions, source, num_slots());
    int32_t* next = &next_[source * spec_.num_experts];
    const int64_t num_local = spec_.experts_per_rank();
    for (int64_t i = 0; i < num_slots(); ++i) {
      const int32_t id = ids[i];
      positions[i] = -1;
      if (id < 0 || next[id] >= ends_[id]) continue;
      positions[i] = next[id]++;
      int32_t* sources = blocks_.ret<int32_t>(kSources, id / num_local, spec_.capacity);
      sources[positions[i]] = static_cast<int32_t>(source * num_slots() + i);
    }
  }

  CallSpec spec_;
  Blocks blocks_;
  std::vector<int32_t> next_;  // [source rank, expert]: rows counted, then the next position
  std::vector<int64_t> ends_;  // [expert]: where its real rows end
};

// ---- dispatch -------------------------------------------------------------------------------

// Operands x, s, sources, padded_group_sizes; results rows, row_s. Each expert rank's rows are
// pulled from their sources, in ranges of rows.
class DispatchOperation final : public Operation {
 public:
  DispatchOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices)
      : spec_(spec), blocks_(spec, std::move(devices)) {
    std::vector<int64_t> ends;
    for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) {
      ends.push_back(LastGroupEnd(rank));
      Split(rank, 0, ends.back(), item_bytes(), ranges_);
    }
    num_filled_ = static_cast<int64_t>(ranges_.size());
    for (int64_t rank = 0; rank < spec_.num_ranks && spec_.zero_tail; ++rank) {
      Split(rank, ends[rank], spec_.capacity, item_bytes(), ranges_);
    }
  }

  int64_t num_chunks(int) const override { return static_cast<int64_t>(ranges_.size()); }

  void Run(int, int64_t chunk) override {
    const Range range = ranges_[chunk];
    const int64_t row_bytes = spec_.row_bytes();
    char* rows = blocks_.ret<char>(0, range.rank, spec_.capacity * row_bytes);
    float* row_s = blocks_.ret<float>(1, range.rank, spec_.capacity);
    if (chunk >= num_filled_) {
      std::memset(rows + range.begin * row_bytes, 0, (range.end - range.begin) * row_bytes);
      std::fill(row_s + range.begin, row_s + range.end, 0.0f);
      return;
    }
    const int32_t* sources = blocks_.arg<int32_t>(2, range.rank, spec_.capacity);
    for (int64_t row = range.begin; row < range.end && !failed(); ++row) {
      CopyRow(sources[row], rows + row * row_bytes, row_s + row, range.rank, row);
    }
  }

 private:
  int64_t item_bytes() const { return spec_.row_bytes() + static_cast<int64_t>(sizeof(float)); }

  int64_t LastGroupEnd(int64_t rank) {
    const int64_t num_local = spec_.experts_per_rank();
    const int32_t* sizes = blocks_.arg<int32_t>(3, rank, num_local);
    int64_t end = 0;
    for (int64_t e = 0; e < num_local; ++e) end += std::max(0, sizes[e]);
    if (end <= spec_.capacity) return end;
    Fail(Join(ToString(spec_), ": padded_group_sizes of rank ", rank, " add up to ", end,
              ", past the capacity; pass the plan that jax_moe.plan returned"));
    return spec_.capacity;
  }

  void CopyRow(int32_t source, char* to, float* to_s, int64_t rank, int64_t row) {
    const int64_t row_bytes = spec_.row_bytes();
    const int64_t slots = spec_.tokens * spec_.top_k;
    if (source < 0) {
      std::memset(to, 0, row_bytes);
      *to_s = 0.0f;
      return;
    }
    if (source >= spec_.num_ranks * slots) {
      Fail(Join(ToString(spec_), ": sources of rank ", rank, ", row ", row, " is ", source,
                ", not below ranks * tokens * top_k; pass the plan that jax_moe.plan returned"));
      return;
    }
    const int64_t from = source / slots;
    const int64_t slot = source % slots;
    std::memcpy(to, blocks_.arg<char>(0, from, spec_.tokens * row_bytes) +
                        slot / spec_.top_k * row_bytes, row_bytes);
    *to_s = blocks_.arg<float>(1, from, slots)[slot];
  }

  CallSpec spec_;
  Blocks blocks_;
  std::vector<Range> ranges_;
  int64_t num_filled_ = 0;  // ranges before this one hold groups, the others the tail
};

// ---- combine --------------------------------------------------------------------------------

// Operands rows, row_s, expert_ids, positions; results y, s. Each token pulls its rows by its own
// positions, in ranges of tokens.
class CombineOperation final : public Operation {
 public:
  CombineOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices)
      : spec_(spec), blocks_(spec, std::move(devices)) {
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

std::unique_ptr<Operation> MakeOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices) {
  switch (spec.kind) {
    case OperationKind::kPlan:
      return std::make_unique<PlanOperation>(spec, std::move(devices));
    case OperationKind::kDispatch:
      return std::make_unique<DispatchOperation>(spec, std::move(devices));
    case OperationKind::kCombine:
      return std::make_unique<CombineOperation>(spec, std::move(devices));
  }
  return nullptr;
}

}  // namespace jax_moe
