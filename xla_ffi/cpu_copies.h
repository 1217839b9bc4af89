// Copies of rows that are not read again soon.

#ifndef JAX_MOE_CPU_COPIES_H_
#define JAX_MOE_CPU_COPIES_H_

#include <cstdint>

namespace jax_moe {

// Copies past the caches where the machine can (x86-64, `to` on 16 bytes), so that the lines
// written are neither fetched first nor pushed into the caches; else like memcpy. Before other
// threads may see the bytes the copying thread calls FinishStreaming().
void CopyStreaming(void* to, const void* from, int64_t num_bytes);
void FinishStreaming();

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_COPIES_H_
