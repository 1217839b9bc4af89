// How large results are written: past the caches, into large pages.

#ifndef JAX_MOE_CPU_COPIES_H_
#define JAX_MOE_CPU_COPIES_H_

#include <cstdint>

namespace jax_moe {

// Copies past the caches where the machine can (x86-64, `to` on 16 bytes), so that the lines
// written are neither fetched first nor pushed into the caches; else like memcpy. Before other
// threads may see the bytes the copying thread calls FinishStreaming().
void CopyStreaming(void* to, const void* from, int64_t num_bytes);
void FinishStreaming();

// To be called before a result is written. The allocator maps blocks of 32 MiB and more afresh for
// every call, so that each page is cleared and faulted in: that costs more than the copy itself.
// Large pages take a sixth of the time; where the system has none, nothing changes.
void PrepareResult(void* result, int64_t num_bytes);

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_COPIES_H_
