#include "cuda_device.h"

#include <cstdlib>
#include <memory>

#include "ptx/params.h"

namespace jax_moe::cuda {

namespace {

// Kernels are written for this compute capability and run on later ones.
constexpr int kOldestMajor = 9;
constexpr unsigned kJitLogBytes = 8192;

std::mutex devices_mutex;
std::map<int, std::unique_ptr<Device>>& Devices() {
  // Never destroyed: threads may still launch while the process ends.
  static auto* devices = new std::map<int, std::unique_ptr<Device>>;
  return *devices;
}

Status UuidOf(DeviceId id, std::string* text) {
  Uuid uuid;
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceGetUuid_v2(&uuid, id));
  text->clear();
  for (const unsigned char byte : uuid.bytes) {
    for (const int digit : {byte >> 4, byte & 15}) *text += "0123456789abcdef"[digit];
  }
  return {};
}

}  // namespace

const char* OperationName(int operation) {
  switch (operation) {
    case ABI_OPERATION_PLAN:
      return "plan";
    case ABI_OPERATION_DISPATCH:
      return "dispatch";
    case ABI_OPERATION_COMBINE:
      return "combine";
  }
  return "unknown operation";
}

KernelShape ShapeOf(int operation, uint32_t num_experts) {
  switch (operation) {
    case ABI_OPERATION_DISPATCH:
      return {ABI_DISPATCH_THREADS, ABI_DISPATCH_SMEM_BYTES};
    case ABI_OPERATION_COMBINE:
      return {ABI_COMBINE_THREADS, ABI_COMBINE_SMEM_BYTES};
    default:
      return {ABI_PLAN_THREADS, ptx::PlanSmemBytes(num_experts)};
  }
}

Status Device::Get(int ordinal, Device** device) {
  const std::lock_guard<std::mutex> lock(devices_mutex);
  auto& devices = Devices();
  auto found = devices.find(ordinal);
  if (found == devices.end()) {
    std::unique_ptr<Device> opened(new Device(ordinal));
    JAX_MOE_RETURN_IF_ERROR(opened->Open());
    found = devices.emplace(ordinal, std::move(opened)).first;
  }
  *device = found->second.get();
  return {};
}

Status Device::Open() {
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceGet(&id_, ordinal_));
  char name[256] = {};
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceGetName(name, sizeof(name) - 1, id_));
  name_ = "GPU " + std::to_string(ordinal_) + " (" + name + ")";
  int cooperative = 0;
  for (auto [attribute, value] :
       {std::pair(kAttributeMajor, &major_), std::pair(kAttributeMinor, &minor_),
        std::pair(kAttributeNumSms, &num_sms_),
        std::pair(kAttributeCooperativeLaunch, &cooperative)}) {
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceGetAttribute(value, attribute, id_));
  }
  if (major_ < kOldestMajor) {
    return {StatusCode::kUnimplemented, name_ + " has compute capability " +
                                            std::to_string(major_) + "." + std::to_string(minor_) +
                                            ", but jax_moe's kernels need 9.0 (Hopper) or later"};
  }
  if (!cooperative) {
    return {StatusCode::kUnimplemented, name_ + " does not offer cooperative launches"};
  }
  // The primary context is XLA's too, and is never given back.
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDevicePrimaryCtxRetain(&context_, id_));
  JAX_MOE_CUDA_ENTER(context_);
  for (int operation = 1; operation <= kNumKernels; ++operation) {
    JAX_MOE_RETURN_IF_ERROR(LoadKernel(operation));
  }
  return {};
}

Status Device::LoadKernel(int operation) {
  const KernelImage& image = kKernelImages[operation - 1];
  Module module = nullptr;
  JAX_MOE_RETURN_IF_ERROR(LoadModule(image, &module));
  Function& kernel = kernels_[operation - 1];
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuModuleGetFunction(&kernel, module, image.entry));
  const unsigned smem = ShapeOf(operation, ABI_MAX_EXPERTS).smem_bytes;
  JAX_MOE_CUDA_RETURN_IF_ERROR(
      driver().cuFuncSetAttribute(kernel, kFunctionMaxDynamicSmem, static_cast<int>(smem)));
  return {};
}

Status Device::LoadModule(const KernelImage& image, Module* module) {
  // JAX_MOE_COMPILE_PTX=1 tries on this chip what later ones get.
  const char* compile = std::getenv("JAX_MOE_COMPILE_PTX");
  const bool wanted = compile == nullptr || compile[0] != '1';
  const bool fits = wanted && image.cubin != nullptr && major_ == kOldestMajor && minor_ == 0;
  if (fits && driver().cuModuleLoadDataEx(module, image.cubin, 0, nullptr, nullptr) == kSuccess) {
    return {};
  }
  precompiled_ = false;
  char log[kJitLogBytes] = {};
  int options[] = {kJitErrorLog, kJitErrorLogBytes};
  void* values[] = {log, reinterpret_cast<void*>(static_cast<uintptr_t>(sizeof(log) - 1))};
  const Result result = driver().cuModuleLoadDataEx(module, image.ptx, 2, options, values);
  if (result == kSuccess) return {};
  int version = 0;
  driver().cuDriverGetVersion(&version);
  Status status = DriverError("driver().cuModuleLoadDataEx", result, __FILE__, __LINE__);
  status.code = StatusCode::kUnimplemented;
  status.message =
      name_ + ": the driver (CUDA " + std::to_string(version / 1000) + "." +
      std::to_string(version % 1000 / 10) + ") refuses the PTX of " + image.entry +
      ", which is of ISA 8.0 for sm_90 and needs CUDA 12.0 or later: " + status.message +
      (log[0] ? "\n" : "") + log;
  return status;
}

Status Device::ResidentBlocks(int operation, uint32_t num_experts, int* blocks) {
  const KernelShape shape = ShapeOf(operation, num_experts);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto key = std::pair(operation, shape.smem_bytes);
  auto found = resident_.find(key);
  if (found == resident_.end()) {
    JAX_MOE_CUDA_ENTER(context_);
    int per_sm = 0;
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_sm, kernel(operation), static_cast<int>(shape.threads), shape.smem_bytes));
    found = resident_.emplace(key, per_sm * num_sms_).first;
  }
  *blocks = found->second;
  return {};
}

Status Device::FreeBytes(uint64_t* free_bytes, uint64_t* total_bytes) const {
  JAX_MOE_CUDA_ENTER(context_);
  size_t free_size = 0, total_size = 0;
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemGetInfo_v2(&free_size, &total_size));
  *free_bytes = free_size;
  *total_bytes = total_size;
  return {};
}

Status Device::Synchronize() const {
  JAX_MOE_CUDA_ENTER(context_);
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuCtxSynchronize());
  return {};
}

Status Device::GetUuid(std::string* uuid) const { return UuidOf(id_, uuid); }

Status Device::GetReach(std::vector<Reach>* others) const {
  int count = 0;
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceGetCount(&count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    if (ordinal == ordinal_) continue;
    DeviceId peer = 0;
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceGet(&peer, ordinal));
    int can = 0, atomics = 0;
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceCanAccessPeer(&can, id_, peer));
    // Atomics work over NVLink, and not over PCIe.
    JAX_MOE_CUDA_RETURN_IF_ERROR(
        driver().cuDeviceGetP2PAttribute(&atomics, kP2pNativeAtomics, id_, peer));
    Reach& reach = others->emplace_back(Reach{"", can != 0, atomics != 0});
    JAX_MOE_RETURN_IF_ERROR(UuidOf(peer, &reach.uuid));
  }
  return {};
}

Status Device::ExportProbe(IpcHandle* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  JAX_MOE_CUDA_ENTER(context_);
  if (probe_ == 0) {
    JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuMemAlloc_v2(&probe_, kSharedGranularity));
  }
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuIpcGetMemHandle(handle, probe_));
  return {};
}

Status Device::OpenMemory(const IpcHandle& handle, DevicePtr* address) const {
  JAX_MOE_CUDA_ENTER(context_);
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuIpcOpenMemHandle_v2(address, handle, kIpcLazyPeerAccess));
  return {};
}

Status Device::CloseMemory(DevicePtr address) const {
  JAX_MOE_CUDA_ENTER(context_);
  JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuIpcCloseMemHandle(address));
  return {};
}

Status EnablePeers(const std::vector<Device*>& devices, std::vector<std::pair<int, int>>* refused) {
  for (const Device* device : devices) {
    for (const Device* peer : devices) {
      if (device == peer || device == nullptr || peer == nullptr) continue;
      int can = 0;
      JAX_MOE_CUDA_RETURN_IF_ERROR(driver().cuDeviceCanAccessPeer(&can, device->id(), peer->id()));
      if (!can) {
        refused->emplace_back(device->ordinal(), peer->ordinal());
        continue;
      }
      JAX_MOE_CUDA_ENTER(device->context());
      const Result result = driver().cuCtxEnablePeerAccess(peer->context(), 0);
      // XLA has often done it already.
      if (result != kErrorPeerAccessAlreadyEnabled) JAX_MOE_CUDA_RETURN_IF_ERROR(result);
    }
  }
  return {};
}

}  // namespace jax_moe::cuda
