// What the operations share: a rank's block in its device's buffers, and ranges of work.

#ifndef JAX_MOE_CPU_BLOCKS_H_
#define JAX_MOE_CPU_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cpu_copies.h"
#include "cpu_operations.h"

namespace jax_moe {

// Bytes that one chunk reads and writes, about: small enough to spread evenly over the threads,
// large enough to drown the handing out.
inline constexpr int64_t kChunkBytes = 256 * 1024;

template <typename... Values>
std::string Join(const Values&... values) {
  std::ostringstream out;
  (out << ... << values);
  return out.str();
}

inline int64_t AlignUp(int64_t value, int64_t alignment) {
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

  // Result `idx` of every device, of `count` bytes a rank.
  void PrepareResult(int idx, int64_t count) const {
    for (const DeviceBuffers& device : devices_) {
      jax_moe::PrepareResult(device.rets[idx], virtual_ranks_ * count);
    }
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

inline void Split(int64_t rank, int64_t begin, int64_t end, int64_t item_bytes,
                  std::vector<Range>& out) {
  const int64_t step = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, item_bytes));
  for (; begin < end; begin += step) out.push_back({rank, begin, std::min(end, begin + step)});
}

std::unique_ptr<Operation> MakePlan(const CallSpec& spec, std::vector<DeviceBuffers> devices);
std::unique_ptr<Operation> MakeDispatch(const CallSpec& spec, std::vector<DeviceBuffers> devices);
std::unique_ptr<Operation> MakeCombine(const CallSpec& spec, std::vector<DeviceBuffers> devices);

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_BLOCKS_H_
