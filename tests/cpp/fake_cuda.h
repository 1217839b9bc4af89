// What the tests set in the stand-in for libcuda, and read back from it.

#ifndef JAX_MOE_TESTS_FAKE_CUDA_H_
#define JAX_MOE_TESTS_FAKE_CUDA_H_

#include <cstdint>

extern "C" {

struct FakeCudaSettings {
  int32_t driver_version = 13000;
  int32_t num_devices = 4;
  int32_t compute_major = 9;
  int32_t cooperative = 1;
  int32_t num_sms = 132;
  int32_t blocks_per_sm = 1;
  int32_t peers_refused = 0;  // device 0 cannot reach device 1
  int32_t peers_enabled = 1;  // enabling access says "already enabled"
  int32_t cubin_refused = 0;
  int32_t ptx_refused = 0;
  int32_t no_nvlink = 0;
  int32_t ipc_refused = 0;
  int32_t ipc_same_process = 0;               // own handles can be opened: threads play processes
  int32_t first_uuid = 0;                     // of device 0, then counting up
  uint64_t memory_bytes = uint64_t{1} << 32;  // of each device
};

struct FakeCudaState {
  int64_t num_launches = 0;
  int64_t num_allocations = 0;  // ever
  int64_t num_modules = 0;
  int64_t num_synchronized = 0;
  int64_t misuses = 0;          // calls without a context, frees of unknown memory, ...
  uint64_t used_bytes[8] = {};  // by device
  int64_t num_open = 0;         // mappings of other processes' memory
  int64_t num_opened = 0;       // ever
  // The last launch.
  int32_t device = -1;
  int32_t cooperative = 0;
  uint32_t grid = 0, block = 0, smem_bytes = 0;
  uint64_t stream = 0;
  char entry[32] = {};
  unsigned char params[256] = {};
};

FakeCudaSettings* FakeCuda_Settings();
FakeCudaState* FakeCuda_State();

}  // extern "C"

#endif  // JAX_MOE_TESTS_FAKE_CUDA_H_
