#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu_blocks.h"
#include "cpu_copies.h"

namespace jax_moe {
namespace {

// From this size of all rows of a call on they will have left the caches before anyone reads them.
constexpr int64_t kStreamingBytes = 16 * 1024 * 1024;

// Operands x, s, sources, padded_group_sizes; results rows, row_s. Each expert rank's rows are
// pulled from their sources, in ranges of rows.
class DispatchOperation final : public Operation {
 public:
  DispatchOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices)
      : spec_(spec), blocks_(spec, std::move(devices)) {
    blocks_.PrepareResult(0, spec_.capacity * spec_.row_bytes());
    std::vector<int64_t> ends;
    for (int64_t rank = 0; rank < spec_.num_ranks; ++rank) {
      ends.push_back(LastGroupEnd(rank));
      Split(rank, 0, ends.back(), item_bytes(), ranges_);
    }
    num_filled_ = static_cast<int64_t>(ranges_.size());
    const int64_t num_rows = std::accumulate(ends.begin(), ends.end(), int64_t{0});
    streams_ = num_rows * spec_.row_bytes() >= kStreamingBytes;
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
    if (streams_) FinishStreaming();
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
    const char* token =
        blocks_.arg<char>(0, from, spec_.tokens * row_bytes) + slot / spec_.top_k * row_bytes;
    if (streams_) {
      CopyStreaming(to, token, row_bytes);
    } else {
      std::memcpy(to, token, row_bytes);
    }
    *to_s = blocks_.arg<float>(1, from, slots)[slot];
  }

  CallSpec spec_;
  Blocks blocks_;
  std::vector<Range> ranges_;
  bool streams_ = false;
  int64_t num_filled_ = 0;  // ranges before this one hold groups, the others the tail
};

}  // namespace

std::unique_ptr<Operation> MakeDispatch(const CallSpec& spec, std::vector<DeviceBuffers> devices) {
  return std::make_unique<DispatchOperation>(spec, std::move(devices));
}

}  // namespace jax_moe
