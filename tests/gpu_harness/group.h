// A group of ranks over the devices of this process: pools with guard bands, report, launches,
// checked outputs.
#ifndef JAX_MOE_TESTS_GPU_HARNESS_GROUP_H_
#define JAX_MOE_TESTS_GPU_HARNESS_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../../ptx/params.h"
#include "cases.h"
#include "driver.h"

namespace harness {

struct Device {
  int ordinal;
  CUcontext context;
  CUstream stream;
  CUfunction plan, dispatch, combine;
  int num_sms;
};

// Opens `count` devices, enables peer access between them and loads the three kernels from
// `directory`.
std::vector<Device> OpenDevices(int count, const std::string& directory);

// An output: poisoned, with guard bands before and after it.
class Output {
 public:
  Output() = default;
  explicit Output(size_t bytes);
  void Poison(CUstream stream) const;
  CUdeviceptr ptr() const { return buffer_.ptr() + kGuard; }
  size_t bytes() const { return bytes_; }
  void CheckGuards(const std::string& what) const;

 private:
  static constexpr size_t kGuard = 1024;
  DeviceBuffer buffer_;
  size_t bytes_ = 0;
};

// Device-side operands and results of one device's ranks, for calls of one shape.
struct Arrays {
  DeviceBuffer ids_in, x, s_in, rows_in, row_s_in;
  Output expert_ids, positions, sources, arrivals, group_sizes, padded_group_sizes, dropped,
      invalid;
  Output rows, row_s, y, s;
  std::vector<const Output*> outputs() const;
};

struct Tuning {
  uint32_t blocks_per_rank;  // 0: all SMs
  uint32_t link_blocks;      // 0: all blocks
  uint32_t chunk_tokens;     // 0: jax_moe::ptx::DefaultChunkTokens
};

class Group {
 public:
  // `launched` devices take part; the group may have more ranks than they hold (the rest never
  // join).
  Group(std::vector<Device> devices, uint32_t num_ranks, uint32_t virtual_ranks,
        const jax_moe::ptx::PoolLayout& layout);
  ~Group();

  // Zeroes the pools; epochs and flags start at `epoch`.
  void Reset(uint64_t epoch);
  Arrays MakeArrays(size_t device, const Sizes& sizes) const;
  // operation: ABI_OPERATION_*. Enqueues one call on one device's stream.
  void Launch(size_t device, int operation, const Sizes& sizes, const Arrays& arrays,
              const Tuning& tuning, CUstream stream = nullptr) const;
  void Synchronize() const;
  void CheckGuards(const std::string& what) const;

  const std::vector<Device>& devices() const { return devices_; }
  uint32_t virtual_ranks() const { return virtual_ranks_; }
  CUdeviceptr pool(uint32_t rank) const { return pools_[rank].ptr(); }
  void SetTimeouts(uint64_t join_ns, uint64_t flight_ns);
  void SetHostAbort(uint32_t value);
  const jax_moe::ptx::Record& record(size_t device, uint32_t virtual_rank) const;
  uint64_t waited_ns(size_t device, uint32_t virtual_rank, int operation, uint32_t peer) const;

 private:
  uint8_t* report(size_t device) const { return static_cast<uint8_t*>(reports_[device]); }
  std::vector<Device> devices_;
  uint32_t num_ranks_, virtual_ranks_;
  jax_moe::ptx::PoolLayout layout_;
  std::vector<DeviceBuffer> pools_, tables_;
  std::vector<void*> reports_;
};

}  // namespace harness

#endif  // JAX_MOE_TESTS_GPU_HARNESS_GROUP_H_
