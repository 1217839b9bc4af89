#include "cpu_copies.h"

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace jax_moe {

#if defined(__x86_64__)
void CopyStreaming(void* to, const void* from, int64_t num_bytes) {
  auto* out = static_cast<__m128i*>(to);
  const auto* in = static_cast<const __m128i*>(from);
  constexpr int64_t kLine = 64;
  const bool is_aligned = reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0;
  const int64_t num_lines = is_aligned ? num_bytes / kLine : 0;
  for (int64_t i = 0; i < num_lines; ++i, in += 4, out += 4) {
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(out, in, num_bytes - num_lines * kLine);
}

void FinishStreaming() { _mm_sfence(); }
#else
void CopyStreaming(void* to, const void* from, int64_t num_bytes) {
  std::memcpy(to, from, num_bytes);
}

void FinishStreaming() {}
#endif

#if defined(__linux__)
void PrepareResult(void* result, int64_t num_bytes) {
  constexpr int64_t kMappedBytes = int64_t{32} << 20;
  constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
  if (num_bytes < kMappedBytes) return;
  // Only pages that lie within the result.
  const uintptr_t from = reinterpret_cast<uintptr_t>(result);
  const uintptr_t begin = (from + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (from + num_bytes) / kLargePage * kLargePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: may fail
}
#else
void PrepareResult(void*, int64_t) {}
#endif

}  // namespace jax_moe
