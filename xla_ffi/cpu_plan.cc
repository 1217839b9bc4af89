#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "cpu_blocks.h"

namespace jax_moe {
namespace {

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

}  // namespace

std::unique_ptr<Operation> MakePlan(const CallSpec& spec, std::vector<DeviceBuffers> devices) {
  return std::make_unique<PlanOperation>(spec, std::move(devices));
}

}  // namespace jax_moe
