#include "cpu_sums.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#error "jax_moe: flushing of subnormals is written for x86-64 and ARM64 only"
#endif

// Compiles the function once per vector width and picks one when the library is loaded. The
// results are the same: each lane does the same IEEE additions in the same order.
#if defined(__x86_64__) && !defined(JAX_MOE_NO_TARGET_CLONES)
#define JAX_MOE_VECTORISE \
  __attribute__((noinline, target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define JAX_MOE_VECTORISE __attribute__((noinline))
#endif
#define JAX_MOE_INLINE inline __attribute__((always_inline))

namespace jax_moe {
namespace {

// Elements of a row summed at a time: three fp32 accumulators of this length stay in L1.
constexpr int64_t kBlock = 512;

struct Float32 {
  using Bits = uint32_t;
  static JAX_MOE_INLINE float Load(Bits bits) { return std::bit_cast<float>(bits); }
  static JAX_MOE_INLINE Bits Store(float value) { return std::bit_cast<uint32_t>(value); }
  static JAX_MOE_INLINE float Round(float value) { return value; }
};

struct BFloat16 {
  using Bits = uint16_t;
  static JAX_MOE_INLINE float Load(Bits bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
  // `value` is already rounded, so that its low half is zero.
  static JAX_MOE_INLINE Bits Store(float value) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  }
  // To nearest, ties to even, by integer arithmetic; a NaN stays one (quiet).
  static JAX_MOE_INLINE float Round(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t quiet = bits | 0x00400000u;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return std::bit_cast<float>((is_nan ? quiet : rounded) & 0xffff0000u);
  }
};

template <typename T>
JAX_MOE_INLINE void LoadRow(float* __restrict acc, const typename T::Bits* __restrict row,
                            int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = T::Load(row[i]);
}

template <typename T>
JAX_MOE_INLINE void AddRow(float* __restrict acc, const typename T::Bits* __restrict row,
                           int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += T::Load(row[i]);
}

template <typename T>
JAX_MOE_INLINE void RoundAll(float* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = T::Round(acc[i]);
}

template <typename T>
JAX_MOE_INLINE void StoreRow(typename T::Bits* __restrict row, const float* __restrict acc,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] = T::Store(acc[i]);
}

JAX_MOE_INLINE void AddAll(float* __restrict acc, const float* __restrict other, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += other[i];
}

// Sums the terms [begin, end) of one rank over [offset, offset + n) into `acc`.
template <typename T>
JAX_MOE_INLINE void SumRank(const Term* terms, int64_t begin, int64_t end, int64_t offset,
                            int64_t n, float* acc) {
  using Bits = typename T::Bits;
  LoadRow<T>(acc, static_cast<const Bits*>(terms[begin].row) + offset, n);
  for (int64_t i = begin + 1; i < end; ++i) {
    AddRow<T>(acc, static_cast<const Bits*>(terms[i].row) + offset, n);
  }
  if (end - begin > 1) RoundAll<T>(acc, n);
}

// Sums the terms [begin, end) of one node into `acc`; `scratch` holds one rank's partial sum.
template <typename T>
JAX_MOE_INLINE void SumNode(const Term* terms, int64_t begin, int64_t end, int64_t offset,
                            int64_t n, float* acc, float* scratch) {
  using Bits = typename T::Bits;
  int64_t num_partials = 0;
  while (begin < end) {
    int64_t rank_end = begin + 1;
    while (rank_end < end && terms[rank_end].rank == terms[begin].rank) ++rank_end;
    if (num_partials == 0) {
      SumRank<T>(terms, begin, rank_end, offset, n, acc);
    } else if (rank_end - begin == 1) {
      AddRow<T>(acc, static_cast<const Bits*>(terms[begin].row) + offset, n);
    } else {
      SumRank<T>(terms, begin, rank_end, offset, n, scratch);
      AddAll(acc, scratch, n);
    }
    ++num_partials;
    begin = rank_end;
  }
  if (num_partials > 1) RoundAll<T>(acc, n);
}

template <typename T>
JAX_MOE_INLINE void Sum(const Term* terms, int64_t num_terms, int64_t hidden,
                        typename T::Bits* out) {
  alignas(64) float total[kBlock];
  alignas(64) float node[kBlock];
  alignas(64) float scratch[kBlock];
  for (int64_t offset = 0; offset < hidden; offset += kBlock) {
    const int64_t n = std::min(kBlock, hidden - offset);
    int64_t num_nodes = 0;
    for (int64_t begin = 0; begin < num_terms; ++num_nodes) {
      int64_t end = begin + 1;
      while (end < num_terms && terms[end].node == terms[begin].node) ++end;
      SumNode<T>(terms, begin, end, offset, n, num_nodes == 0 ? total : node, scratch);
      if (num_nodes > 0) AddAll(total, node, n);
      begin = end;
    }
    if (num_nodes > 1) RoundAll<T>(total, n);
    StoreRow<T>(out + offset, total, n);
  }
}

}  // namespace

JAX_MOE_VECTORISE void SumFloat32(const Term* terms, int64_t num_terms, int64_t hidden, void* out) {
  Sum<Float32>(terms, num_terms, hidden, static_cast<uint32_t*>(out));
}

JAX_MOE_VECTORISE void SumBFloat16(const Term* terms, int64_t num_terms, int64_t hidden,
                                   void* out) {
  Sum<BFloat16>(terms, num_terms, hidden, static_cast<uint16_t*>(out));
}

#if defined(__x86_64__)
constexpr uint32_t kFlushToZero = 1u << 15;      // MXCSR.FTZ
constexpr uint32_t kDenormalsAreZero = 1u << 6;  // MXCSR.DAZ

FlushSubnormals::FlushSubnormals() : saved_(_mm_getcsr()) {
  _mm_setcsr(static_cast<uint32_t>(saved_) | kFlushToZero | kDenormalsAreZero);
}

FlushSubnormals::~FlushSubnormals() { _mm_setcsr(static_cast<uint32_t>(saved_)); }
#else
constexpr uint64_t kFlushToZero = 1ull << 24;  // FPCR.FZ: inputs and results

FlushSubnormals::FlushSubnormals() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(saved_ | kFlushToZero));
}

FlushSubnormals::~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#endif

}  // namespace jax_moe
