// The PTX macros of ptx/memory.ptxh as C++: the same names, orders and meanings, plus delays on
// purpose.
#ifndef JAX_MOE_TESTS_TWIN_MEMORY_H_
#define JAX_MOE_TESTS_TWIN_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace twin {

using Address = uint8_t*;

// Stops this thread for a while, now and then, so that orders that are rare on their own happen.
void Delay();

inline std::atomic_ref<uint64_t> Word64(Address at) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(at));
}
inline std::atomic_ref<uint32_t> Word32(Address at) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(at));
}

inline uint64_t LD_ACQUIRE_SYS_U64(Address at) {
  return Word64(at).load(std::memory_order_acquire);
}
inline uint64_t LD_RELAXED_SYS_U64(Address at) {
  return Word64(at).load(std::memory_order_relaxed);
}
inline uint32_t LD_RELAXED_SYS_U32(Address at) {
  return Word32(at).load(std::memory_order_relaxed);
}
inline uint64_t LD_RELAXED_GPU_U64(Address at) {
  return Word64(at).load(std::memory_order_relaxed);
}
inline void ST_RELEASE_SYS_U64(Address at, uint64_t value) {
  Delay();
  Word64(at).store(value, std::memory_order_release);
}
inline void ST_RELEASE_SYS_U32(Address at, uint32_t value) {
  Word32(at).store(value, std::memory_order_release);
}
inline void ST_RELAXED_SYS_U64(Address at, uint64_t value) {
  Word64(at).store(value, std::memory_order_relaxed);
}
inline void ST_RELAXED_SYS_U32(Address at, uint32_t value) {
  Word32(at).store(value, std::memory_order_relaxed);
}
inline void ST_RELAXED_GPU_U64(Address at, uint64_t value) {
  Word64(at).store(value, std::memory_order_relaxed);
}
inline void ST_RELAXED_GPU_U32(Address at, uint32_t value) {
  Word32(at).store(value, std::memory_order_relaxed);
}
inline uint32_t ATOM_ACQ_REL_GPU_ADD_U32(Address at, uint32_t value) {
  return Word32(at).fetch_add(value, std::memory_order_acq_rel);
}
inline uint32_t ATOM_RELAXED_GPU_ADD_U32(Address at, uint32_t value) {
  return Word32(at).fetch_add(value, std::memory_order_relaxed);
}
inline uint32_t ATOM_RELAXED_GPU_CAS_B32(Address at, uint32_t expected, uint32_t value) {
  Word32(at).compare_exchange_strong(expected, value, std::memory_order_relaxed);
  return expected;
}

// Weak accesses, at which ThreadSanitizer looks.
template <typename T>
T LD(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <typename T>
void ST(Address at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// One warp's bulk stores. As late as the real ones may be: nothing is written before
// BULK_WAIT_WRITES, and a stage that is overwritten earlier spoils the store.
class BulkStores {
 public:
  void BULK_STORE(Address to, const uint8_t* stage, size_t bytes) {
    pending_.push_back({to, stage, bytes});
  }
  // The stores have read their stages: from here on they hold the bytes themselves.
  void BULK_WAIT_READ();
  void BULK_WAIT_WRITES();

 private:
  struct Store {
    Address to;
    const uint8_t* stage;
    size_t bytes;
  };
  struct Held {
    Address to;
    std::vector<uint8_t> bytes;
  };
  std::vector<Store> pending_;
  std::vector<Held> held_;
};

}  // namespace twin

#endif  // JAX_MOE_TESTS_TWIN_MEMORY_H_
