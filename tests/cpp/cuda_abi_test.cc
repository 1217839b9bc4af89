// Compiles only if our declarations of the driver's types agree with cuda.h. Run where there is
// one.

#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "cuda_driver.h"

namespace {

namespace own = jax_moe::cuda;

static_assert(sizeof(own::DevicePtr) == sizeof(CUdeviceptr));
static_assert(sizeof(own::Result) == sizeof(CUresult) && sizeof(own::DeviceId) == sizeof(CUdevice));
static_assert(sizeof(own::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(own::LaunchConfig, grid_x) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(own::LaunchConfig, block_x) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(own::LaunchConfig, dynamic_smem_bytes) ==
              offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(own::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(own::LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(own::LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(own::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(own::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(own::kLaunchCooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
static_assert(own::kErrorPeerAccessAlreadyEnabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
static_assert(own::kAttributeNumSms == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(own::kAttributeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(own::kAttributeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(own::kAttributeCooperativeLaunch == CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
static_assert(own::kFunctionMaxDynamicSmem == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(own::kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(own::kHostAllocDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(sizeof(own::IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(own::Uuid) == sizeof(CUuuid));
static_assert(own::kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(own::kP2pNativeAtomics == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
static_assert(own::kJitErrorLog == CU_JIT_ERROR_LOG_BUFFER);
static_assert(own::kJitErrorLogBytes == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);

// Two pointer, integer or enumeration types that are passed alike.
template <typename A, typename B>
constexpr bool kAlike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;

template <typename A, typename B>
constexpr bool kSameCall = false;
template <typename R, typename... A, typename S, typename... B>
constexpr bool kSameCall<R (*)(A...), S (*)(B...)> = [] {
  if constexpr (sizeof...(A) == sizeof...(B)) {
    return (kAlike<A, B> && ... && kAlike<R, S>);
  } else {
    return false;
  }
}();

// cuda.h names some functions by macros, which turn into the versioned names that we open.
#define CHECK_SIGNATURE(function, parameters) \
  static_assert(kSameCall<decltype(own::Driver::function), decltype(&::function)>, #function);
JAX_MOE_CUDA_FUNCTIONS(CHECK_SIGNATURE)

}  // namespace

int main() { return 0; }
