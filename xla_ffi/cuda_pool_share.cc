// How processes come to each other's pools: driver handles, sent as text.
#include <cstring>

#include "cuda_pool.h"

namespace jax_moe::cuda {

namespace {

// What stands before the handles in an export.
struct Header {
  PoolSizes sizes;
  uint32_t num_handles;
  uint32_t unused = 0;
  uint64_t generation;
};
static_assert(sizeof(Header) == 32);

bool Equal(const PoolSizes& a, const PoolSizes& b) {
  return a.tokens == b.tokens && a.top_k == b.top_k && a.num_experts == b.num_experts &&
         a.payload_bytes == b.payload_bytes;
}

}  // namespace

Status DevicePools::ExportPools(std::string* handles) const {
  JAX_MOE_CUDA_ENTER(device_->context());
  for (const DevicePtr pool : pools_) {
    IpcHandle handle;
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuIpcGetMemHandle(&handle, pool));
    handles->append(handle.bytes, sizeof(handle.bytes));
  }
  return {};
}

Status DevicePools::OpenPeer(uint32_t rank, const IpcHandle& handle, uint64_t generation) {
  const auto known = peers_.find(rank);
  if (known != peers_.end()) {
    if (known->second.generation == generation) return {};
    JAX_MOE_RETURN_IF_ERROR(device_->CloseMemory(known->second.address));
    peers_.erase(known);
  }
  DevicePtr address = 0;
  JAX_MOE_RETURN_IF_ERROR(device_->OpenMemory(handle, &address));
  peers_[rank] = {address, generation};
  return {};
}

Status DevicePools::ClosePeers() {
  while (!peers_.empty()) {
    JAX_MOE_RETURN_IF_ERROR(device_->CloseMemory(peers_.begin()->second.address));
    peers_.erase(peers_.begin());
  }
  return {};
}

Status PoolSet::ClosePeers() {
  return ForEach([](DevicePools& part) { return part.ClosePeers(); });
}

size_t PoolSet::export_bytes(size_t num_devices) const {
  return sizeof(Header) + num_devices * virtual_ranks_ * sizeof(IpcHandle);
}

Status PoolSet::Export(std::string* exports) const {
  std::string handles;
  JAX_MOE_RETURN_IF_ERROR(ForEach([&](DevicePools& part) { return part.ExportPools(&handles); }));
  const Header header{.sizes = sizes_,
                      .num_handles = static_cast<uint32_t>(handles.size() / sizeof(IpcHandle)),
                      .generation = generation_};
  exports->append(reinterpret_cast<const char*>(&header), sizeof(header));
  exports->append(handles);
  return {};
}

Status PoolSet::OpenPeer(size_t instance, uint32_t rank, const IpcHandle& handle,
                         uint64_t generation) {
  for (const auto& viewer : parts_[instance]) {
    if (viewer == nullptr) continue;
    Status status = viewer->OpenPeer(rank, handle, generation);
    if (status.ok()) continue;
    status.message = viewer->device().name() + " cannot open the pool of rank " +
                     std::to_string(rank) + ": " + status.message;
    return status;
  }
  return {};
}

Status PoolSet::Import(const std::vector<std::vector<int>>& owners, int process,
                       const std::string& exports) {
  Header header;
  if (exports.size() >= sizeof(header)) std::memcpy(&header, exports.data(), sizeof(header));
  if (exports.size() < sizeof(header) || !Equal(header.sizes, sizes_) ||
      exports.size() != sizeof(header) + header.num_handles * sizeof(IpcHandle)) {
    return {StatusCode::kFailedPrecondition,
            "process " + std::to_string(process) +
                " has other pools than this one: all processes must make the same calls"};
  }
  const char* next = exports.data() + sizeof(header);
  for (size_t i = 0; i < owners.size(); ++i) {
    for (size_t d = 0; d < owners[i].size(); ++d) {
      if (owners[i][d] != process) continue;
      for (uint32_t v = 0; v < virtual_ranks_; ++v, next += sizeof(IpcHandle)) {
        IpcHandle handle;
        std::memcpy(handle.bytes, next, sizeof(handle.bytes));
        const auto rank = static_cast<uint32_t>(d * virtual_ranks_ + v);
        JAX_MOE_RETURN_IF_ERROR(OpenPeer(i, rank, handle, header.generation));
      }
    }
  }
  return {};
}

}  // namespace jax_moe::cuda
