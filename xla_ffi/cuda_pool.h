// The symmetric memory of a group: a pool per rank, each device's table of pools, and its report
// page.
//
// A pool set in use never moves and is never freed, because captured CUDA graphs keep the addresses
// of its tables and reports and replay without asking the host. Only the pools themselves can be
// given back, after the tables point to tombstones: pool heads whose abort word is set, at which a
// kernel fills its outputs and ends.

#ifndef JAX_MOE_CUDA_POOL_H_
#define JAX_MOE_CUDA_POOL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_device.h"
#include "ptx/params.h"
#include "status.h"

namespace jax_moe::cuda {

// The largest call for which there is room.
struct PoolSizes {
  uint32_t tokens = 0;  // per rank
  uint32_t top_k = 0;
  uint32_t num_experts = 0;
  uint32_t payload_bytes = 0;  // of one token; 0 if only plans run here
};
ptx::PoolLayout LayoutOf(uint32_t num_ranks, const PoolSizes& sizes);

// Deadlines of a wait: for ranks that have not come yet, and once all have joined.
struct Timeouts {
  uint64_t join_ns = 0;
  uint64_t flight_ns = 0;
};

// Devices of one group instance in group order. Rank r lives on device r / virtual_ranks.
using Instance = std::vector<Device*>;

// The part of a pool set on one device.
class DevicePools {
 public:
  DevicePools(Device* device, uint32_t virtual_ranks)
      : device_(device), virtual_ranks_(virtual_ranks) {}
  ~DevicePools();
  DevicePools(const DevicePools&) = delete;
  DevicePools& operator=(const DevicePools&) = delete;

  Status AllocateFixed(uint32_t num_ranks);   // table, report, tombstones
  Status AllocatePools(uint64_t pool_bytes);  // one for each of the device's ranks
  Status ZeroPools();
  Status FreePools();
  Status WriteAbortWords(uint32_t word);
  // Writes the addresses at which this device finds the pools of all ranks.
  Status WriteTable(const std::vector<DevicePtr>& addresses);

  const Device& device() const { return *device_; }
  bool has_pools() const { return !pools_.empty(); }
  DevicePtr pool(uint32_t v) const { return pools_[v]; }
  DevicePtr tombstone(uint32_t v) const;
  DevicePtr table() const { return table_; }
  DevicePtr report() const { return report_; }

  // The report, which kernels write at any time.
  void SetTimeouts(const Timeouts& timeouts);
  void SetAbort(bool abort);
  void ClearReport();
  bool ReadRecord(uint32_t v, ptx::Record* record) const;
  uint64_t WaitedNs(uint32_t v, int operation, uint32_t peer) const;

 private:
  Device* device_;
  uint32_t virtual_ranks_;
  uint64_t pool_bytes_ = 0;
  std::vector<DevicePtr> pools_;
  DevicePtr tombstones_ = 0;
  DevicePtr table_ = 0;
  DevicePtr report_ = 0;           // as the device sees it
  unsigned char* host_ = nullptr;  // the same page
};

class PoolSet {
 public:
  static Status Create(const std::vector<Instance>& instances, uint32_t num_ranks,
                       uint32_t virtual_ranks, const PoolSizes& sizes, const Timeouts& timeouts,
                       std::unique_ptr<PoolSet>* created);

  const ptx::PoolLayout& layout() const { return layout_; }
  const PoolSizes& sizes() const { return sizes_; }
  DevicePools& at(int instance, int index) { return *parts_[instance][index]; }
  bool has_pools() const { return parts_[0][0]->has_pools(); }
  // On each device; what Create or Restore will allocate there.
  uint64_t bytes_per_device() const { return virtual_ranks_ * layout_.size; }

  // Waits for all that runs on the devices.
  Status Drain();
  // Ends all calls, waits for them, and leaves the tables pointing to tombstones.
  Status Suspend();
  // Frees the pools of a suspended set.
  Status FreePools();
  // Makes a suspended set usable: allocates pools if need be, zeroes them and the reports.
  Status Restore(const Timeouts& timeouts);
  void SetTimeouts(const Timeouts& timeouts);
  void SetAbort(bool abort);
  // Makes all calls end as if that rank had given up, until Restore.
  void Break(uint32_t rank);

  // Whether a call may have been launched, or captured, with this set.
  bool is_used() const { return is_used_; }
  void MarkUsed() { is_used_ = true; }

 private:
  Status CheckRoom() const;
  DevicePtr AddressSeenFrom(const DevicePools& viewer, const DevicePools& owner, uint32_t v,
                            bool tombstones) const;
  Status WriteTables(bool tombstones);
  template <typename Function>
  Status ForEach(Function function);

  std::atomic<bool> is_used_ = false;
  uint32_t virtual_ranks_ = 1;
  PoolSizes sizes_;
  ptx::PoolLayout layout_{};
  std::vector<std::vector<std::unique_ptr<DevicePools>>> parts_;  // [instance][device]
};

std::string FormatBytes(uint64_t bytes);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_POOL_H_
