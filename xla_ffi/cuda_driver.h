// The CUDA driver, opened at run time: a table of the functions used, and the check of their
// results.
//
// The few types below are declared here rather than taken from cuda.h: the driver's binary
// interface is frozen under the versioned names, so building needs no CUDA toolkit, and
// tests/cpp/cuda_abi_test.cc compares them with cuda.h wherever there is one.

#ifndef JAX_MOE_CUDA_DRIVER_H_
#define JAX_MOE_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace jax_moe::cuda {

using Result = int;
using DeviceId = int;
using DevicePtr = unsigned long long;
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;

constexpr Result kSuccess = 0;
constexpr Result kErrorPeerAccessAlreadyEnabled = 704;

constexpr int kAttributeNumSms = 16;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeCooperativeLaunch = 95;
constexpr int kFunctionMaxDynamicSmem = 8;
constexpr unsigned kHostAllocPortable = 1;
constexpr unsigned kHostAllocDeviceMap = 2;
constexpr int kJitErrorLog = 5;
constexpr int kJitErrorLogBytes = 6;
constexpr unsigned kLaunchCooperative = 2;
constexpr int kP2pNativeAtomics = 3;
constexpr unsigned kIpcLazyPeerAccess = 1;

struct Uuid {
  unsigned char bytes[16] = {};
};
// Names a piece of device memory to other processes of the host.
struct IpcHandle {
  char bytes[64] = {};
};

struct LaunchAttribute {
  unsigned id = 0;
  alignas(8) union {
    char bytes[64] = {};
    int cooperative;
  } value;
};

struct LaunchConfig {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned block_x = 1, block_y = 1, block_z = 1;
  unsigned dynamic_smem_bytes = 0;
  Stream stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  unsigned num_attributes = 0;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

// The functions by their exported names.
#define JAX_MOE_CUDA_FUNCTIONS(F)                                               \
  F(cuGetErrorName, (Result, const char**))                                     \
  F(cuGetErrorString, (Result, const char**))                                   \
  F(cuInit, (unsigned))                                                         \
  F(cuDriverGetVersion, (int*))                                                 \
  F(cuDeviceGetCount, (int*))                                                   \
  F(cuDeviceGet, (DeviceId*, int))                                              \
  F(cuDeviceGetName, (char*, int, DeviceId))                                    \
  F(cuDeviceGetAttribute, (int*, int, DeviceId))                                \
  F(cuDeviceGetUuid_v2, (Uuid*, DeviceId))                                      \
  F(cuDeviceCanAccessPeer, (int*, DeviceId, DeviceId))                          \
  F(cuDeviceGetP2PAttribute, (int*, int, DeviceId, DeviceId))                   \
  F(cuDevicePrimaryCtxRetain, (Context*, DeviceId))                             \
  F(cuCtxPushCurrent_v2, (Context))                                             \
  F(cuCtxPopCurrent_v2, (Context*))                                             \
  F(cuCtxSynchronize, ())                                                       \
  F(cuCtxEnablePeerAccess, (Context, unsigned))                                 \
  F(cuMemGetInfo_v2, (size_t*, size_t*))                                        \
  F(cuMemAlloc_v2, (DevicePtr*, size_t))                                        \
  F(cuMemFree_v2, (DevicePtr))                                                  \
  F(cuMemsetD8_v2, (DevicePtr, unsigned char, size_t))                          \
  F(cuMemcpyHtoD_v2, (DevicePtr, const void*, size_t))                          \
  F(cuIpcGetMemHandle, (IpcHandle*, DevicePtr))                                 \
  F(cuIpcOpenMemHandle_v2, (DevicePtr*, IpcHandle, unsigned))                   \
  F(cuIpcCloseMemHandle, (DevicePtr))                                           \
  F(cuMemHostAlloc, (void**, size_t, unsigned))                                 \
  F(cuMemHostGetDevicePointer_v2, (DevicePtr*, void*, unsigned))                \
  F(cuMemFreeHost, (void*))                                                     \
  F(cuModuleLoadDataEx, (Module*, const void*, unsigned, int*, void**))         \
  F(cuModuleGetFunction, (Function*, Module, const char*))                      \
  F(cuFuncSetAttribute, (Function, int, int))                                   \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int*, Function, int, size_t)) \
  F(cuLaunchKernelEx, (const LaunchConfig*, Function, void**, void**))

struct Driver {
#define JAX_MOE_CUDA_MEMBER(name, parameters) Result(*name) parameters = nullptr;
  JAX_MOE_CUDA_FUNCTIONS(JAX_MOE_CUDA_MEMBER)
#undef JAX_MOE_CUDA_MEMBER
};

// Opens the library and fills the table, the first time; later calls repeat the first success, or
// try again. `path` is for tests; empty means libcuda.so.1.
Status OpenDriver(const std::string& path = "");
// The table; to be used only after OpenDriver has succeeded.
const Driver& driver();

Status DriverError(const char* expression, Result result, const char* file, int line);

// Makes a context current for a scope, and what was current before current again.
class ScopedContext {
 public:
  explicit ScopedContext(Context context) : result_(driver().cuCtxPushCurrent_v2(context)) {}
  ~ScopedContext() {
    Context popped;
    if (result_ == kSuccess) driver().cuCtxPopCurrent_v2(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  Result result() const { return result_; }

 private:
  Result result_;
};

}  // namespace jax_moe::cuda

// Returns from the function with the expression, the error's name and text, and the place.
#define JAX_MOE_CUDA_RETURN_IF_ERROR(expression)                                     \
  do {                                                                               \
    const ::jax_moe::cuda::Result result_ = (expression);                            \
    if (result_ != ::jax_moe::cuda::kSuccess) [[unlikely]]                           \
      return ::jax_moe::cuda::DriverError(#expression, result_, __FILE__, __LINE__); \
  } while (0)

// Enters a context for the rest of the scope, or returns.
#define JAX_MOE_CUDA_ENTER(context)                               \
  const ::jax_moe::cuda::ScopedContext entered_context_(context); \
  JAX_MOE_CUDA_RETURN_IF_ERROR(entered_context_.result())

#define JAX_MOE_RETURN_IF_ERROR(expression)   \
  do {                                        \
    ::jax_moe::Status status_ = (expression); \
    if (!status_.ok()) [[unlikely]]           \
      return status_;                         \
  } while (0)

#endif  // JAX_MOE_CUDA_DRIVER_H_
