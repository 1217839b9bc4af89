#include "cuda_pool.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

namespace jax_moe::cuda {

namespace {

// Left to XLA for what it allocates outside its preallocation (library workspaces, modules).
constexpr uint64_t kReserveBytes = uint64_t{256} << 20;
constexpr uint32_t kHostAborted = 1 + ABI_HOST_ABORT_RANK;

template <typename T>
std::atomic_ref<T> Word(unsigned char* page, size_t offset) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(page + offset));
}

}  // namespace

std::string FormatBytes(uint64_t bytes) {
  char text[48];
  if (bytes >= uint64_t{1} << 30) {
    std::snprintf(text, sizeof(text), "%.2f GiB", bytes / 1073741824.0);
  } else {
    std::snprintf(text, sizeof(text), "%.2f MiB", bytes / 1048576.0);
  }
  return text;
}

std::string ToString(const PoolSizes& sizes) {
  return "tokens=" + std::to_string(sizes.tokens) + ", top_k=" + std::to_string(sizes.top_k) +
         ", num_experts=" + std::to_string(sizes.num_experts) + ", " +
         std::to_string(sizes.payload_bytes) + " bytes a token";
}

ptx::PoolLayout LayoutOf(uint32_t num_ranks, const PoolSizes& sizes) {
  return ptx::PoolLayout::Make(num_ranks, sizes.tokens, sizes.top_k, sizes.num_experts,
                               sizes.payload_bytes);
}

// For a set that failed half-way or that no call has used: one in use is kept for good.
DevicePools::~DevicePools() {
  ClosePeers();
  FreePools();
  const ScopedContext entered(device_->context());
  if (tombstones_) driver().cuMemFree_v2(tombstones_);
  if (table_) driver().cuMemFree_v2(table_);
  if (host_) driver().cuMemFreeHost(host_);
}

Status DevicePools::AllocateFixed(uint32_t num_ranks) {
  JAX_MOE_CUDA_ENTER(device_->context());
  const uint64_t heads = uint64_t{virtual_ranks_} * ABI_POOL_HEAD_BYTES;
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemAlloc_v2(&tombstones_, heads));
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemsetD8_v2(tombstones_, 0, heads));
  for (uint32_t v = 0; v < virtual_ranks_; ++v) {
    JAX_MOE_CUDA_RETURN_IF_ERROR(
        driver().cuMemcpyHtoD_v2(tombstones_ + v * ABI_POOL_HEAD_BYTES + ABI_POOL_ABORT,
                                 &kHostAborted, sizeof(kHostAborted)));
  }
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemAlloc_v2(&table_, num_ranks * sizeof(DevicePtr)));
  void* page = nullptr;
  JAX_MOE_CUDA_RETURN_IF_ERROR(
      driver().cuMemHostAlloc(&page, ABI_REPORT_BYTES, kHostAllocPortable | kHostAllocDeviceMap));
  host_ = static_cast<unsigned char*>(page);
  std::memset(host_, 0, ABI_REPORT_BYTES);
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemHostGetDevicePointer_v2(&report_, host_, 0));
  return {};
}

Status DevicePools::AllocatePools(uint64_t pool_bytes) {
  JAX_MOE_CUDA_ENTER(device_->context());
  pool_bytes_ = pool_bytes;
  while (pools_.size() < virtual_ranks_) {
    DevicePtr pool = 0;
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemAlloc_v2(&pool, pool_bytes));
    pools_.push_back(pool);
  }
  return {};
}

Status DevicePools::ZeroPools() {
  JAX_MOE_CUDA_ENTER(device_->context());
  for (const DevicePtr pool : pools_) {
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemsetD8_v2(pool, 0, pool_bytes_));
  }
  // Setting device memory does not wait for the device; launches come from streams that do not
  // either.
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuCtxSynchronize());
  return {};
}

Status DevicePools::FreePools() {
  JAX_MOE_CUDA_ENTER(device_->context());
  while (!pools_.empty()) {
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemFree_v2(pools_.back()));
    pools_.pop_back();
  }
  return {};
}

Status DevicePools::WriteAbortWords(uint32_t word) {
  JAX_MOE_CUDA_ENTER(device_->context());
  for (const DevicePtr pool : pools_) {
    JAX_MOE_CUDA_RETURN_IF_ERROR(
        driver().cuMemcpyHtoD_v2(pool + ABI_POOL_ABORT, &word, sizeof(word)));
  }
  return {};
}

Status DevicePools::WriteTable(const std::vector<DevicePtr>& addresses) {
  JAX_MOE_CUDA_ENTER(device_->context());
  JAX_MOE_CUDA_RETURN_IF_ERROR(
      driver().cuMemcpyHtoD_v2(table_, addresses.data(), addresses.size() * sizeof(DevicePtr)));
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuCtxSynchronize());
  return {};
}

DevicePtr DevicePools::tombstone(uint32_t v) const {
  return tombstones_ + uint64_t{v} * ABI_POOL_HEAD_BYTES;
}

void DevicePools::SetTimeouts(const Timeouts& timeouts) {
  Word<uint64_t>(host_, ABI_REPORT_JOIN_TIMEOUT_NS).store(timeouts.join_ns);
  Word<uint64_t>(host_, ABI_REPORT_FLIGHT_TIMEOUT_NS).store(timeouts.flight_ns);
}

void DevicePools::SetAbort(bool abort) {
  Word<uint32_t>(host_, ABI_REPORT_HOST_ABORT).store(abort ? 1 : 0);
}

void DevicePools::ClearReport() {
  std::memset(host_ + ABI_REPORT_RECORDS, 0, ABI_REPORT_BYTES - ABI_REPORT_RECORDS);
}

bool DevicePools::ReadRecord(uint32_t v, ptx::Record* record) const {
  unsigned char* at = host_ + ABI_REPORT_RECORDS + v * ABI_REPORT_RECORD_BYTES;
  // Set last by the kernel, after which the record does not change.
  if (Word<uint32_t>(at, ABI_RECORD_VALID).load(std::memory_order_acquire) == 0) return false;
  std::memcpy(record, at, sizeof(*record));
  return true;
}

uint64_t DevicePools::WaitedNs(uint32_t v, int operation, uint32_t peer) const {
  const size_t entry = (size_t{v} * ABI_NUM_OPERATIONS + operation - 1) * ABI_MAX_RANKS + peer;
  return Word<uint64_t>(host_, ABI_REPORT_WAITS + entry * sizeof(uint64_t)).load();
}

Status PoolSet::Create(const std::vector<Instance>& instances, uint32_t num_ranks,
                       uint32_t virtual_ranks, const PoolSizes& sizes, const Timeouts& timeouts,
                       std::unique_ptr<PoolSet>* created) {
  std::unique_ptr<PoolSet> set;
  JAX_MOE_RETURN_IF_ERROR(Allocate(instances, num_ranks, virtual_ranks, sizes, timeouts,
                                   /*shared=*/false, &set));
  JAX_MOE_RETURN_IF_ERROR(set->Enable());
  *created = std::move(set);
  return {};
}

Status PoolSet::Allocate(const std::vector<Instance>& instances, uint32_t num_ranks,
                         uint32_t virtual_ranks, const PoolSizes& sizes, const Timeouts& timeouts,
                         bool shared, std::unique_ptr<PoolSet>* created) {
  *created = std::make_unique<PoolSet>();
  PoolSet* set = created->get();
  set->virtual_ranks_ = virtual_ranks;
  set->sizes_ = sizes;
  set->layout_ = LayoutOf(num_ranks, sizes);
  set->pool_bytes_ =
      shared ? ptx::AlignUp(set->layout_.size, kSharedGranularity) : set->layout_.size;
  for (const Instance& instance : instances) {
    auto& parts = set->parts_.emplace_back();
    for (Device* device : instance) {
      parts.push_back(device == nullptr ? nullptr
                                        : std::make_unique<DevicePools>(device, virtual_ranks));
    }
  }
  // The driver may hold its lock while an allocation waits for a running kernel, and that kernel
  // for a launch on another device: so nothing of this process may be running.
  JAX_MOE_RETURN_IF_ERROR(set->Drain());
  JAX_MOE_RETURN_IF_ERROR(
      set->ForEach([&](DevicePools& part) { return part.AllocateFixed(num_ranks); }));
  return set->Prepare(timeouts);
}

bool PoolSet::has_pools() const {
  for (const auto& instance : parts_) {
    for (const auto& part : instance) {
      if (part != nullptr) return part->has_pools();
    }
  }
  return false;
}

Status PoolSet::CheckRoom() const {
  for (const auto& instance : parts_) {
    for (const auto& part : instance) {
      if (part == nullptr || part->has_pools()) continue;
      uint64_t free_bytes = 0, total_bytes = 0;
      JAX_MOE_RETURN_IF_ERROR(part->device().FreeBytes(&free_bytes, &total_bytes));
      const uint64_t need = bytes_per_device();
      if (need + kReserveBytes <= free_bytes) continue;
      return {StatusCode::kResourceExhausted,
              "the pools of " + std::to_string(virtual_ranks_) + " rank(s) need " +
                  FormatBytes(need) + " on " + part->device().name() + " (and " +
                  FormatBytes(kReserveBytes) + " are to stay free), but only " +
                  FormatBytes(free_bytes) + " of " + FormatBytes(total_bytes) +
                  " are free beside XLA's preallocation: set XLA_PYTHON_CLIENT_MEM_FRACTION lower "
                  "(XLA takes 0.75 by default), or use fewer tokens a call"};
    }
  }
  return {};
}

// The one place that says at which address a device finds a rank's pool. Within one process every
// device has the same address for it; pools of other processes are mapped at addresses of their
// own. Tombstones are not shared: what a kernel writes to them is not read.
DevicePtr PoolSet::AddressSeenFrom(const DevicePools& viewer, const DevicePools* owner,
                                   uint32_t rank, bool tombstones) const {
  const uint32_t v = rank % virtual_ranks_;
  if (tombstones) return (owner != nullptr ? *owner : viewer).tombstone(v);
  return owner != nullptr ? owner->pool(v) : viewer.peer_pool(rank);
}

Status PoolSet::WriteTables(bool tombstones) {
  for (auto& instance : parts_) {
    for (auto& viewer : instance) {
      if (viewer == nullptr) continue;
      std::vector<DevicePtr> addresses;
      for (auto& owner : instance) {
        for (uint32_t v = 0; v < virtual_ranks_; ++v) {
          addresses.push_back(AddressSeenFrom(*viewer, owner.get(),
                                              static_cast<uint32_t>(addresses.size()), tombstones));
        }
      }
      JAX_MOE_RETURN_IF_ERROR(viewer->WriteTable(addresses));
    }
  }
  return {};
}

Status PoolSet::Suspend() {
  SetAbort(true);
  JAX_MOE_RETURN_IF_ERROR(Drain());
  JAX_MOE_RETURN_IF_ERROR(WriteTables(/*tombstones=*/true));
  // For what started before it saw the new tables.
  return Drain();
}

Status PoolSet::FreePools() {
  return ForEach([](DevicePools& part) { return part.FreePools(); });
}

Status PoolSet::Restore(const Timeouts& timeouts) {
  JAX_MOE_RETURN_IF_ERROR(Prepare(timeouts));
  return Enable();
}

Status PoolSet::Prepare(const Timeouts& timeouts) {
  JAX_MOE_RETURN_IF_ERROR(CheckRoom());
  if (!has_pools()) ++generation_;
  JAX_MOE_RETURN_IF_ERROR(
      ForEach([&](DevicePools& part) { return part.AllocatePools(pool_bytes_); }));
  JAX_MOE_RETURN_IF_ERROR(ForEach([](DevicePools& part) { return part.ZeroPools(); }));
  return ForEach([&](DevicePools& part) {
    part.ClearReport();
    part.SetTimeouts(timeouts);
    return Status{};
  });
}

Status PoolSet::Enable() {
  SetAbort(false);
  // Last: every pool is zero, and no abort is ordered, before any device sees one.
  return WriteTables(/*tombstones=*/false);
}

Status PoolSet::Drain() {
  return ForEach([](DevicePools& part) { return part.device().Synchronize(); });
}

void PoolSet::SetTimeouts(const Timeouts& timeouts) {
  ForEach([&](DevicePools& part) {
    part.SetTimeouts(timeouts);
    return Status{};
  });
}

void PoolSet::SetAbort(bool abort) {
  ForEach([&](DevicePools& part) {
    part.SetAbort(abort);
    return Status{};
  });
}

void PoolSet::Break(uint32_t rank) {
  SetAbort(true);  // for calls that wait; the word below is for those to come
  ForEach([&](DevicePools& part) { return part.WriteAbortWords(1 + rank); });
}

}  // namespace jax_moe::cuda
