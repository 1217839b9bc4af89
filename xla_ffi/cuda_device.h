// One GPU of this process: its context, the kernels loaded into it, how many of their blocks fit,
// and how it reaches other GPUs.

#ifndef JAX_MOE_CUDA_DEVICE_H_
#define JAX_MOE_CUDA_DEVICE_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "cuda_images.h"

namespace jax_moe::cuda {

// Operations are numbered as in ptx/abi.h (ABI_OPERATION_*), from 1.
const char* OperationName(int operation);

// What every block of a kernel needs.
struct KernelShape {
  unsigned threads;
  unsigned smem_bytes;  // dynamic
};
KernelShape ShapeOf(int operation, uint32_t num_experts);

// A GPU that this process sees, as seen from another one.
struct Reach {
  std::string uuid;  // hexadecimal
  bool peer_access;
  bool nvlink;  // else PCIe
};

class Device {
 public:
  // The device of that CUDA ordinal, which is opened and kept for the rest of the process. The
  // driver must be open.
  static Status Get(int ordinal, Device** device);

  int ordinal() const { return ordinal_; }
  DeviceId id() const { return id_; }
  Context context() const { return context_; }
  int num_sms() const { return num_sms_; }
  const std::string& name() const { return name_; }
  Function kernel(int operation) const { return kernels_[operation - 1]; }
  // Whether the kernels came from the embedded machine code rather than the driver's compiler.
  bool precompiled() const { return precompiled_; }

  // Blocks of that kernel that are resident at once on the whole device.
  Status ResidentBlocks(int operation, uint32_t num_experts, int* blocks);
  Status FreeBytes(uint64_t* free_bytes, uint64_t* total_bytes) const;
  Status Synchronize() const;

  // The same in every process that uses the GPU.
  Status GetUuid(std::string* uuid) const;
  // All other GPUs that this process sees.
  Status GetReach(std::vector<Reach>* others) const;
  // A piece of memory for others to open on trial; allocated once and kept.
  Status ExportProbe(IpcHandle* handle);
  // Maps another process's memory into this device's address space, or unmaps it. One context opens
  // a handle once at a time.
  Status OpenMemory(const IpcHandle& handle, DevicePtr* address) const;
  Status CloseMemory(DevicePtr address) const;

 private:
  explicit Device(int ordinal) : ordinal_(ordinal) {}
  Status Open();
  Status LoadKernel(int operation);
  Status LoadModule(const KernelImage& image, Module* module);

  int ordinal_;
  DeviceId id_ = 0;
  Context context_ = nullptr;
  std::string name_;
  int num_sms_ = 0;
  int major_ = 0;
  int minor_ = 0;
  bool precompiled_ = true;
  Function kernels_[kNumKernels] = {};
  std::mutex mutex_;                                  // guards all below
  std::map<std::pair<int, unsigned>, int> resident_;  // by operation and shared memory
  DevicePtr probe_ = 0;
};

// The driver may share the whole of a smaller block with another process.
constexpr uint64_t kSharedGranularity = uint64_t{2} << 20;

// Pairs of ordinals that cannot reach each other's memory. Access is switched on for all others.
// Null stands for the device of another process.
Status EnablePeers(const std::vector<Device*>& devices, std::vector<std::pair<int, int>>* refused);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_DEVICE_H_
