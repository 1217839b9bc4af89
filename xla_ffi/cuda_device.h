// One GPU of this process: its context, the kernels loaded into it, and how many of their blocks
// fit.

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
  std::mutex mutex_;
  std::map<std::pair<int, unsigned>, int> resident_;  // by operation and shared memory
};

// Pairs of ordinals that cannot reach each other's memory. Access is switched on for all others.
Status EnablePeers(const std::vector<Device*>& devices, std::vector<std::pair<int, int>>* refused);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_DEVICE_H_
