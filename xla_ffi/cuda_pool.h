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
#include <map>
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
std::string ToString(const PoolSizes& sizes);

// Deadlines of a wait: for ranks that have not come yet, and once all have joined.
struct Timeouts {
  uint64_t join_ns = 0;
  uint64_t flight_ns = 0;
};

// Devices of one group instance in group order, null where another process has the device. Rank r
// lives on device r / virtual_ranks.
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
  // Names the pools to other processes, one handle after the other.
  Status ExportPools(std::string* handles) const;
  // Maps the pool of a rank of another process. A pool of that generation stays as it is mapped.
  Status OpenPeer(uint32_t rank, const IpcHandle& handle, uint64_t generation);
  Status ClosePeers();
  DevicePtr peer_pool(uint32_t rank) const { return peers_.at(rank).address; }
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
  struct Peer {
    DevicePtr address;
    uint64_t generation;
  };

  Device* device_;
  uint32_t virtual_ranks_;
  std::map<uint32_t, Peer> peers_;  // by rank
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
  // The first half of Create, up to and with Prepare. `created` is set on failure too. The pools of
  // a shared set are to be exported.
  static Status Allocate(const std::vector<Instance>& instances, uint32_t num_ranks,
                         uint32_t virtual_ranks, const PoolSizes& sizes, const Timeouts& timeouts,
                         bool shared, std::unique_ptr<PoolSet>* created);

  const ptx::PoolLayout& layout() const { return layout_; }
  const PoolSizes& sizes() const { return sizes_; }
  DevicePools& at(int instance, int index) { return *parts_[instance][index]; }
  bool has_pools() const;
  // On each device; what Create or Restore will allocate there.
  uint64_t bytes_per_device() const { return virtual_ranks_ * pool_bytes_; }

  // Waits for all that runs on the devices.
  Status Drain();
  // Ends all calls, waits for them, and leaves the tables pointing to tombstones.
  Status Suspend();
  // Frees the pools of a suspended set.
  Status FreePools();
  // Makes a suspended set usable: Prepare and Enable.
  Status Restore(const Timeouts& timeouts);
  // Allocates pools if need be, zeroes them and the reports.
  Status Prepare(const Timeouts& timeouts);
  // Lets calls in: every process must have prepared its pools, and opened those of the others.
  Status Enable();
  void SetTimeouts(const Timeouts& timeouts);
  void SetAbort(bool abort);
  // Makes all calls end as if that rank had given up, until Restore.
  void Break(uint32_t rank);

  // For a set that several processes share. Sizes, generation and handles of this process's pools:
  Status Export(std::string* exports) const;
  // How long that text is for so many devices.
  size_t export_bytes(size_t num_devices) const;
  // Opens the pools of another process, from its export. `owners` is the process of each device.
  Status Import(const std::vector<std::vector<int>>& owners, int process,
                const std::string& exports);
  Status ClosePeers();

  // Whether a call may have been launched, or captured, with this set.
  bool is_used() const { return is_used_; }
  void MarkUsed() { is_used_ = true; }
  // The lowering of a program for which the set was made; 0 for none.
  int64_t lowering = 0;

 private:
  Status CheckRoom() const;
  DevicePtr AddressSeenFrom(const DevicePools& viewer, const DevicePools* owner, uint32_t rank,
                            bool tombstones) const;
  Status WriteTables(bool tombstones);
  // Lets all devices of an instance in this process open a pool of another process.
  Status OpenPeer(size_t instance, uint32_t rank, const IpcHandle& handle, uint64_t generation);
  // Of this process's parts, until one fails.
  template <typename Function>
  Status ForEach(Function function) const {
    for (const auto& instance : parts_) {
      for (const auto& part : instance) {
        if (part != nullptr) JAX_MOE_RETURN_IF_ERROR(function(*part));
      }
    }
    return {};
  }

  std::atomic<bool> is_used_ = false;
  uint32_t virtual_ranks_ = 1;
  PoolSizes sizes_;
  ptx::PoolLayout layout_{};
  uint64_t pool_bytes_ = 0;  // of one rank; with room to the next boundary in a shared set
  uint64_t generation_ = 0;  // of the pools: one more each time they are allocated
  std::vector<std::vector<std::unique_ptr<DevicePools>>> parts_;  // [instance][device], or null
};

std::string FormatBytes(uint64_t bytes);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_POOL_H_
