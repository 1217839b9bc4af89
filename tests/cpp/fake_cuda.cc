// A stand-in for libcuda.so.1 on machines without a GPU: the functions that jax_moe uses, with host
// memory for device memory. Launches do nothing but leave their parameters to be read.

#include "fake_cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidContext = 201;
constexpr int kPeerAlreadyEnabled = 704;
constexpr int kUnsupportedPtxVersion = 222;
constexpr int kMaxDevices = 8;

constexpr int kMapFailed = 205;
// What other processes may open comes in whole pages of this size, each as a file of its own.
constexpr size_t kPage = size_t{2} << 20;

struct Allocation {
  int device;
  size_t bytes;
  int file = -1;
  int num_open = 0;  // mappings of it in this process
};

struct Handle {
  int32_t process;
  int32_t file;
  uint64_t bytes;
  uint64_t address;
  char unused[40];
};
static_assert(sizeof(Handle) == 64);

struct Opened {
  int device;
  Handle handle;
};

std::mutex mutex;
FakeCudaSettings settings;
FakeCudaState state;
std::map<void*, Allocation> allocations;
std::map<void*, Opened> opened;
std::map<std::string, int> entries;  // never shrinks: its nodes serve as function handles
int contexts[kMaxDevices];
thread_local std::vector<int*> current;

int Misuse(int error) {
  ++state.misuses;
  return error;
}

int CurrentDevice() { return current.empty() ? -1 : static_cast<int>(current.back() - contexts); }

// Memory must belong to the current device, or to a peer.
bool IsDeviceMemory(unsigned long long address, size_t bytes) {
  auto after = allocations.upper_bound(reinterpret_cast<void*>(address));
  if (after == allocations.begin()) return false;
  const auto& [start, allocation] = *std::prev(after);
  return address + bytes <= reinterpret_cast<uintptr_t>(start) + allocation.bytes;
}

}  // namespace

EXPORT FakeCudaSettings* FakeCuda_Settings() { return &settings; }
EXPORT FakeCudaState* FakeCuda_State() { return &state; }

EXPORT int cuGetErrorName(int error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}
EXPORT int cuGetErrorString(int, const char** text) {
  *text = "as the test ordered";
  return 0;
}
EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDriverGetVersion(int* version) {
  *version = settings.driver_version;
  return 0;
}
EXPORT int cuDeviceGetCount(int* count) {
  *count = settings.num_devices;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < settings.num_devices ? 0 : 101;
}
EXPORT int cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "Fake H200", bytes);
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 16:
      *value = settings.num_sms;
      return 0;
    case 75:
      *value = settings.compute_major;
      return 0;
    case 76:
      *value = 0;
      return 0;
    case 95:
      *value = settings.cooperative;
      return 0;
  }
  return Misuse(kInvalidValue);
}
EXPORT int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  std::memset(uuid, 0x5a, 16);
  uuid[15] = static_cast<unsigned char>(settings.first_uuid + device);
  return 0;
}
EXPORT int cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  if (attribute != 3 || device == peer) return Misuse(kInvalidValue);
  *value = !settings.no_nvlink;
  return 0;
}
EXPORT int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = !(settings.peers_refused && device == 0 && peer == 1);
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(int** context, int device) {
  *context = &contexts[device];
  return 0;
}
EXPORT int cuCtxPushCurrent_v2(int* context) {
  current.push_back(context);
  return 0;
}
EXPORT int cuCtxPopCurrent_v2(int** context) {
  if (current.empty()) return Misuse(kInvalidContext);
  *context = current.back();
  current.pop_back();
  return 0;
}
EXPORT int cuCtxSynchronize() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (CurrentDevice() < 0) return Misuse(kInvalidContext);
  ++state.num_synchronized;
  return 0;
}
EXPORT int cuCtxEnablePeerAccess(int*, unsigned) {
  return settings.peers_enabled ? kPeerAlreadyEnabled : 0;
}
EXPORT int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (CurrentDevice() < 0) return Misuse(kInvalidContext);
  *total_bytes = settings.memory_bytes;
  *free_bytes = settings.memory_bytes - state.used_bytes[CurrentDevice()];
  return 0;
}
EXPORT int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (CurrentDevice() < 0) return Misuse(kInvalidContext);
  if (state.used_bytes[CurrentDevice()] + bytes > settings.memory_bytes) return kOutOfMemory;
  Allocation allocation{CurrentDevice(), bytes};
  void* memory = nullptr;
  if (bytes % kPage == 0) {
    allocation.file = memfd_create("device memory", 0);
    if (ftruncate(allocation.file, bytes) != 0) return kOutOfMemory;
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, allocation.file, 0);
  } else {
    memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  }
  std::memset(memory, 0xab, bytes);  // device memory comes as it is
  allocations[memory] = allocation;
  state.used_bytes[CurrentDevice()] += bytes;
  ++state.num_allocations;
  *address = reinterpret_cast<uintptr_t>(memory);
  return 0;
}
EXPORT int cuMemFree_v2(unsigned long long address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(reinterpret_cast<void*>(address));
  if (CurrentDevice() < 0 || found == allocations.end()) return Misuse(kInvalidValue);
  const Allocation& allocation = found->second;
  if (allocation.num_open > 0) Misuse(0);
  state.used_bytes[allocation.device] -= allocation.bytes;
  if (allocation.file >= 0) {
    munmap(found->first, allocation.bytes);
    close(allocation.file);
  } else {
    std::free(found->first);
  }
  allocations.erase(found);
  return 0;
}
EXPORT int cuIpcGetMemHandle(Handle* handle, unsigned long long address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(reinterpret_cast<void*>(address));
  if (found == allocations.end() || found->second.file < 0) return Misuse(kInvalidValue);
  const Allocation& allocation = found->second;
  *handle = {getpid(), allocation.file, allocation.bytes, address, {}};
  return 0;
}
EXPORT int cuIpcOpenMemHandle_v2(unsigned long long* address, Handle handle, unsigned flags) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (CurrentDevice() < 0 || flags != 1) return Misuse(kInvalidContext);
  const bool own = handle.process == getpid();
  if (own && !settings.ipc_same_process) return Misuse(kInvalidContext);
  if (settings.ipc_refused) return kMapFailed;
  for (const auto& [at, other] : opened) {  // once a device
    if (other.device == CurrentDevice() && !std::memcmp(&other.handle, &handle, sizeof(handle))) {
      return Misuse(kInvalidValue);
    }
  }
  const auto path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = open(path.c_str(), O_RDWR);
  if (file < 0) return kMapFailed;
  void* memory = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kMapFailed;
  opened[memory] = {CurrentDevice(), handle};
  if (own) ++allocations.at(reinterpret_cast<void*>(handle.address)).num_open;
  ++state.num_open;
  ++state.num_opened;
  *address = reinterpret_cast<uintptr_t>(memory);
  return 0;
}
EXPORT int cuIpcCloseMemHandle(unsigned long long address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened.find(reinterpret_cast<void*>(address));
  if (found == opened.end() || found->second.device != CurrentDevice()) {
    return Misuse(kInvalidValue);
  }
  const Handle& handle = found->second.handle;
  const auto source = allocations.find(reinterpret_cast<void*>(handle.address));
  if (handle.process == getpid() && source != allocations.end()) --source->second.num_open;
  munmap(found->first, handle.bytes);
  opened.erase(found);
  --state.num_open;
  return 0;
}
EXPORT int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (CurrentDevice() < 0 || !IsDeviceMemory(address, bytes)) return Misuse(kInvalidValue);
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return 0;
}
EXPORT int cuMemcpyHtoD_v2(unsigned long long address, const void* source, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (CurrentDevice() < 0 || !IsDeviceMemory(address, bytes)) return Misuse(kInvalidValue);
  std::memcpy(reinterpret_cast<void*>(address), source, bytes);
  return 0;
}
EXPORT int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  if (CurrentDevice() < 0 || (flags & 2) == 0) return Misuse(kInvalidValue);
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return 0;
}
EXPORT int cuMemHostGetDevicePointer_v2(unsigned long long* address, void* memory, unsigned) {
  *address = reinterpret_cast<uintptr_t>(memory);
  return 0;
}
EXPORT int cuMemFreeHost(void* memory) {
  std::free(memory);
  return 0;
}
EXPORT int cuModuleLoadDataEx(const void** module, const void* image, unsigned num_options,
                              int* options, void** values) {
  const bool is_text = num_options > 0;  // only the text is compiled, and asks for a log
  ++state.num_modules;
  *module = image;
  if (!is_text) return settings.cubin_refused ? kInvalidValue : 0;
  if (!settings.ptx_refused) return 0;
  for (unsigned i = 0; i < num_options; ++i) {
    if (options[i] == 5) std::strcpy(static_cast<char*>(values[i]), "ptxas says why");
  }
  return kUnsupportedPtxVersion;
}
EXPORT int cuModuleGetFunction(const std::pair<const std::string, int>** function, const void*,
                               const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  *function = &*entries.emplace(name, 0).first;
  return 0;
}
EXPORT int cuFuncSetAttribute(const std::pair<const std::string, int>*, int attribute, int value) {
  return attribute == 8 && value > 0 && value <= 227 * 1024 ? 0 : Misuse(kInvalidValue);
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = settings.blocks_per_sm;
  return 0;
}

// CUlaunchConfig and CUlaunchAttribute, as far as they are used.
struct FakeAttribute {
  unsigned id;
  unsigned padding;
  union {
    int cooperative;
    char bytes[64];
  };
};
struct FakeConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned smem_bytes;
  void* stream;
  FakeAttribute* attributes;
  unsigned num_attributes;
};

EXPORT int cuLaunchKernelEx(const FakeConfig* config,
                            const std::pair<const std::string, int>* function, void** parameters,
                            void**) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (CurrentDevice() < 0) return Misuse(kInvalidContext);
  ++state.num_launches;
  state.device = CurrentDevice();
  state.grid = config->grid[0];
  state.block = config->block[0];
  state.smem_bytes = config->smem_bytes;
  state.stream = reinterpret_cast<uintptr_t>(config->stream);
  state.cooperative = config->num_attributes == 1 && config->attributes[0].id == 2 &&
                      config->attributes[0].cooperative;
  std::strncpy(state.entry, function->first.c_str(), sizeof(state.entry) - 1);
  std::memcpy(state.params, parameters[0], sizeof(state.params));
  return 0;
}
