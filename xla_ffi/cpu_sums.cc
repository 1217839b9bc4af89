#include "cpu_sums.h"

#include <algorithm>
#include <bit>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#error "jax_moe: flushing of subnormals is written for x86-64 and ARM64 only"
#endif

// Compiles the function once per vector width and picks one when the library is loaded. The
// results are the same: each lane does the same IEEE additions in the same order.
#if defined(__x86_64__) && !defined(JAX_MOE_NO_TARGET_CLONES)
#define JAX_MOE_VECTORISE __attribute__((noinline, target_clones("default", "avx2")))
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
  // To nearest, ties to even, by integer arithmetic. That keeps infinities, and NaNs too: those of
  // sums of bfloat16 have nothing in the low half that could carry.
  static JAX_MOE_INLINE float Round(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  }
};

// Rows added in one pass over the accumulator, which is then loaded and stored once for all.
constexpr int64_t kMaxRows = 4;

// What a pass does with the sum of its rows.
enum class Into {
  kAccumulator,  // acc = row + row + ..., or acc + row + row + ...
  kPartial,      // rounds row + row + ... first: one rank's partial sum
};

// One pass over n elements: adds the rows in order. kFirst: the accumulator holds nothing yet.
template <typename T, Into kInto, bool kFirst, int64_t kRows>
JAX_MOE_INLINE void Pass(float* __restrict acc, const typename T::Bits* const* rows, int64_t n) {
  const typename T::Bits* r[kRows];
  for (int64_t j = 0; j < kRows; ++j) r[j] = rows[j];
  constexpr bool kFromRow = kFirst || kInto == Into::kPartial;
  for (int64_t i = 0; i < n; ++i) {
    float sum = kFromRow ? T::Load(r[0][i]) : acc[i];
    for (int64_t j = kFromRow ? 1 : 0; j < kRows; ++j) sum += T::Load(r[j][i]);
    if (kInto == Into::kPartial) {
      sum = T::Round(sum);
      if (!kFirst) sum = acc[i] + sum;
    }
    acc[i] = sum;
  }
}

// Adds rows one by one to the accumulator, or starts it with them.
template <typename T>
JAX_MOE_INLINE void AddRows(bool first, float* acc, const typename T::Bits* const* rows,
                            int64_t num_rows, int64_t n) {
  constexpr Into kAcc = Into::kAccumulator;
  static_assert(kMaxRows == 4);
  for (int64_t done = 0; done < num_rows; done += kMaxRows, first = false) {
    const typename T::Bits* const* now = rows + done;
    const int64_t count = std::min(kMaxRows, num_rows - done);
    if (first && count == 1) Pass<T, kAcc, true, 1>(acc, now, n);
    if (first && count == 2) Pass<T, kAcc, true, 2>(acc, now, n);
    if (first && count == 3) Pass<T, kAcc, true, 3>(acc, now, n);
    if (first && count == 4) Pass<T, kAcc, true, 4>(acc, now, n);
    if (!first && count == 1) Pass<T, kAcc, false, 1>(acc, now, n);
    if (!first && count == 2) Pass<T, kAcc, false, 2>(acc, now, n);
    if (!first && count == 3) Pass<T, kAcc, false, 3>(acc, now, n);
    if (!first && count == 4) Pass<T, kAcc, false, 4>(acc, now, n);
  }
}

template <typename T>
JAX_MOE_INLINE void RoundAll(float* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = T::Round(acc[i]);
}

JAX_MOE_INLINE void AddAll(float* __restrict acc, const float* __restrict other, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += other[i];
}

// Adds the partial sum of one rank's rows (two or more), or starts the accumulator with it.
template <typename T>
JAX_MOE_INLINE void AddPartial(bool first, float* acc, float* scratch,
                               const typename T::Bits* const* rows, int64_t num_rows, int64_t n) {
  if (first && num_rows == 2) return Pass<T, Into::kPartial, true, 2>(acc, rows, n);
  if (first && num_rows == 3) return Pass<T, Into::kPartial, true, 3>(acc, rows, n);
  if (!first && num_rows == 2) return Pass<T, Into::kPartial, false, 2>(acc, rows, n);
  if (!first && num_rows == 3) return Pass<T, Into::kPartial, false, 3>(acc, rows, n);
  float* partial = first ? acc : scratch;
  Pass<T, Into::kAccumulator, true, 4>(partial, rows, n);
  int64_t done = 4;
  for (; done + 4 <= num_rows; done += 4) {
    Pass<T, Into::kAccumulator, false, 4>(partial, rows + done, n);
  }
  for (; done < num_rows; ++done) Pass<T, Into::kAccumulator, false, 1>(partial, rows + done, n);
  RoundAll<T>(partial, n);
  if (!first) AddAll(acc, scratch, n);
}

// Sums the terms of one node into `acc`, not rounded; returns how many partial sums that were.
template <typename T>
JAX_MOE_INLINE int64_t SumNode(const Term* terms, const typename T::Bits* const* rows,
                               int64_t num_terms, float* acc, float* scratch, int64_t n) {
  const auto is_alone = [&](int64_t i) {
    return (i == 0 || terms[i - 1].rank != terms[i].rank) &&
           (i + 1 == num_terms || terms[i + 1].rank != terms[i].rank);
  };
  int64_t num_partials = 0;
  for (int64_t begin = 0, end; begin < num_terms; begin = end) {
    end = begin + 1;
    if (is_alone(begin)) {  // and all alone ones that follow: their partial sums are their rows
      while (end < num_terms && is_alone(end)) ++end;
      AddRows<T>(num_partials == 0, acc, rows + begin, end - begin, n);
      num_partials += end - begin;
    } else {
      while (end < num_terms && terms[end].rank == terms[begin].rank) ++end;
      AddPartial<T>(num_partials == 0, acc, scratch, rows + begin, end - begin, n);
      ++num_partials;
    }
  }
  return num_partials;
}

// One block of elements of one token.
template <typename T>
JAX_MOE_INLINE void SumBlock(const Term* terms, const typename T::Bits* const* rows,
                             int64_t num_terms, typename T::Bits* __restrict out, int64_t n) {
  alignas(64) float total[kBlock];
  alignas(64) float node[kBlock];
  alignas(64) float scratch[kBlock];
  int64_t num_nodes = 0;
  for (int64_t begin = 0, end; begin < num_terms; begin = end, ++num_nodes) {
    end = begin + 1;
    while (end < num_terms && terms[end].node == terms[begin].node) ++end;
    float* acc = num_nodes == 0 ? total : node;
    const int64_t num_partials =
        SumNode<T>(terms + begin, rows + begin, end - begin, acc, scratch, n);
    if (num_partials > 1 && end - begin < num_terms) RoundAll<T>(acc, n);
    if (num_nodes > 0) AddAll(total, node, n);
  }
  // Rounding twice is rounding once, so that a single node's sum needs no case of its own.
  for (int64_t i = 0; i < n; ++i) out[i] = T::Store(T::Round(total[i]));
}

// Rows that one token can have without an allocation.
constexpr int64_t kFewRows = 32;

template <typename T>
JAX_MOE_INLINE void Sum(const Term* terms, int64_t num_terms, int64_t hidden,
                        typename T::Bits* out) {
  const typename T::Bits* few[kFewRows];
  std::vector<const typename T::Bits*> many(num_terms > kFewRows ? num_terms : 0);
  const typename T::Bits** rows = num_terms > kFewRows ? many.data() : few;
  for (int64_t i = 0; i < num_terms; ++i) {
    rows[i] = static_cast<const typename T::Bits*>(terms[i].row);
  }
  for (int64_t offset = 0; offset < hidden; offset += kBlock) {
    SumBlock<T>(terms, rows, num_terms, out + offset, std::min(kBlock, hidden - offset));
    for (int64_t i = 0; i < num_terms; ++i) rows[i] += kBlock;
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
