// The CUDA driver API through dlopen, and RAII for what the harness takes from it. Errors end the
// program.
#ifndef JAX_MOE_TESTS_GPU_HARNESS_DRIVER_H_
#define JAX_MOE_TESTS_GPU_HARNESS_DRIVER_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace harness {

// The functions used, under their own names; filled by LoadDriver().
// clang-format off: it indents each line of the list further than the last.
#define HARNESS_DRIVER_FUNCTIONS(DO)                                                              \
  DO(cuInit) DO(cuDeviceGet) DO(cuDeviceGetCount) DO(cuDeviceGetName) DO(cuDeviceGetAttribute)    \
  DO(cuDevicePrimaryCtxRetain) DO(cuCtxSetCurrent) DO(cuCtxSynchronize) DO(cuModuleLoad)          \
  DO(cuModuleGetFunction) DO(cuFuncSetAttribute) DO(cuOccupancyMaxActiveBlocksPerMultiprocessor)  \
  DO(cuMemAlloc) DO(cuMemFree) DO(cuMemHostAlloc) DO(cuMemHostGetDevicePointer)                   \
  DO(cuMemFreeHost) DO(cuMemcpyHtoD) DO(cuMemcpyDtoH) DO(cuMemcpyDtoDAsync) DO(cuMemsetD32)       \
  DO(cuStreamCreate) DO(cuStreamSynchronize) DO(cuStreamQuery) DO(cuStreamWaitEvent)              \
  DO(cuLaunchKernelEx) DO(cuEventCreate) DO(cuEventRecord) DO(cuEventSynchronize)                 \
  DO(cuEventElapsedTime) DO(cuStreamBeginCapture) DO(cuStreamEndCapture) DO(cuGraphInstantiate)   \
  DO(cuGraphLaunch) DO(cuGraphExecDestroy) DO(cuGraphDestroy) DO(cuCtxEnablePeerAccess)           \
  DO(cuDeviceCanAccessPeer) DO(cuMemsetD32Async) DO(cuGetErrorName) DO(cuGetErrorString)
// clang-format on

struct Driver {
#define HARNESS_DECLARE(name) decltype(&::name) name = nullptr;
  HARNESS_DRIVER_FUNCTIONS(HARNESS_DECLARE)
#undef HARNESS_DECLARE
};
extern Driver driver;

// Opens libcuda.so.1 and fills `driver`. Ends the program with what is missing.
void LoadDriver();

[[noreturn]] void Fail(const char* file, int line, const std::string& message);
void CheckResult(CUresult result, const char* expression, const char* file, int line);
#define HARNESS_CHECK(expression) \
  ::harness::CheckResult((expression), #expression, __FILE__, __LINE__)
#define HARNESS_REQUIRE(condition, message)                         \
  do {                                                              \
    if (!(condition)) ::harness::Fail(__FILE__, __LINE__, message); \
  } while (false)

// Device memory of the current context.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  CUdeviceptr ptr() const { return ptr_; }
  size_t bytes() const { return bytes_; }

 private:
  CUdeviceptr ptr_ = 0;
  size_t bytes_ = 0;
};

template <typename T>
std::vector<T> Download(CUdeviceptr from, size_t count) {
  std::vector<T> host(count);
  if (count > 0) HARNESS_CHECK(driver.cuMemcpyDtoH(host.data(), from, count * sizeof(T)));
  return host;
}
template <typename T>
void Upload(CUdeviceptr to, const T* from, size_t count) {
  if (count > 0) HARNESS_CHECK(driver.cuMemcpyHtoD(to, from, count * sizeof(T)));
}

}  // namespace harness

#endif  // JAX_MOE_TESTS_GPU_HARNESS_DRIVER_H_
