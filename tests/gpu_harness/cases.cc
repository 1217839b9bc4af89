#include "cases.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "driver.h"

namespace harness {
namespace {

// One 32-bit word that says which array, row and word it is.
uint32_t Origin(uint64_t seed, uint64_t row, uint64_t word) {
  uint64_t h =
      seed * 0x9e3779b97f4a7c15ull + row * 0xc2b2ae3d27d4eb4full + word * 0x165667b19e3779f9ull;
  h ^= h >> 29;
  h *= 0xbf58476d1ce4e5b9ull;
  h ^= h >> 32;
  return static_cast<uint32_t>(h);
}

// A number for the sums: mostly near 1 in size, sometimes subnormal, zero of either sign, infinite
// or NaN.
uint32_t SumOperand(uint32_t origin, bool bf16) {
  const uint32_t kind = origin & 127;
  uint32_t bits = (origin & 0x807fffffu) | ((120 + ((origin >> 24) & 7)) << 23);
  if (kind == 0) bits = origin & 0x807fffffu;                  // subnormal
  if (kind == 1) bits = origin & 0x80000000u;                  // zero
  if (kind == 2) bits = (origin & 0x80000000u) | 0x7f800000u;  // infinity
  if (kind == 3) bits = 0x7fc00000u | (origin >> 24);          // NaN
  if (kind == 4)
    bits = (origin & 0x80ffffffu) | 0x00800000u;  // smallest normals: their sums can be subnormal
  return bf16 ? bits & 0xffff0000u : bits;
}

std::vector<uint8_t> OriginRows(const Sizes& sizes, size_t rows, uint64_t seed, bool for_sums) {
  const size_t words = sizes.payload_bytes() / 4;
  std::vector<uint8_t> bytes(rows * sizes.payload_bytes());
  auto* out = reinterpret_cast<uint32_t*>(bytes.data());
  for (size_t row = 0; row < rows; row++) {
    for (size_t word = 0; word < words; word++) {
      const uint32_t origin = Origin(seed, row, word);
      uint32_t value = origin;
      if (for_sums && sizes.bf16) {
        value = (SumOperand(origin, true) >> 16) | SumOperand(Origin(seed + 1, row, word), true);
      } else if (for_sums) {
        value = SumOperand(origin, false);
      }
      out[row * words + word] = value;
    }
  }
  return bytes;
}

std::vector<float> OriginGates(size_t count, uint64_t seed) {
  std::vector<float> gates(count);
  for (size_t i = 0; i < count; i++) {
    const uint32_t bits = SumOperand(Origin(seed, i, 0), false);
    std::memcpy(&gates[i], &bits, 4);
  }
  return gates;
}

bool IsNan(uint32_t bits, bool bf16) {
  return bf16 ? (bits & 0x7fffu) > 0x7f80u : (bits & 0x7fffffffu) > 0x7f800000u;
}

[[noreturn]] void Differ(const Case& test, const char* what, size_t index, uint64_t got,
                         uint64_t want, size_t differences) {
  char text[256];
  std::snprintf(text, sizeof text, "%s: %s[%zu] = 0x%llx, expected 0x%llx (%zu differ)",
                test.name.c_str(), what, index, static_cast<unsigned long long>(got),
                static_cast<unsigned long long>(want), differences);
  Fail(__FILE__, __LINE__, text);
}

}  // namespace

const char* Name(Routing routing) {
  switch (routing) {
    case Routing::kUniform:
      return "uniform";
    case Routing::kSkewed:
      return "skewed";
    case Routing::kDuplicates:
      return "duplicates";
    case Routing::kInvalid:
      return "invalid";
    case Routing::kNone:
      return "none";
    case Routing::kOneExpert:
      return "one_expert";
    case Routing::kHalfEmpty:
      return "half_empty";
  }
  return "?";
}

std::vector<int32_t> DrawIds(const Sizes& sizes, Routing routing, std::mt19937_64& random) {
  std::vector<int32_t> ids(static_cast<size_t>(sizes.ranks) * sizes.tokens * sizes.topk);
  std::vector<int32_t> deck(sizes.experts);
  for (uint32_t e = 0; e < sizes.experts; e++) deck[e] = static_cast<int32_t>(e);
  const int32_t experts = static_cast<int32_t>(sizes.experts);
  const int32_t favourite = static_cast<int32_t>(random() % sizes.experts);
  for (size_t i = 0; i < ids.size(); i++) {
    const uint32_t k = i % sizes.topk;
    const size_t token = i / sizes.topk;
    if (k < sizes.experts) std::swap(deck[k], deck[k + random() % (sizes.experts - k)]);
    const int32_t drawn =
        k < sizes.experts ? deck[k] : static_cast<int32_t>(random() % sizes.experts);
    const uint64_t die = random();
    int32_t id = drawn;
    if (routing == Routing::kSkewed) id = (die & 3) ? drawn % std::max(1, experts / 8) : drawn;
    if (routing == Routing::kDuplicates) id = static_cast<int32_t>(die % std::min(experts, 3));
    if (routing == Routing::kInvalid && (die & 3) == 0) {
      const int32_t odd[] = {-1, -2, experts, 1 << 30, INT32_MIN, 65535, 65536};
      id = odd[(die >> 8) % 7];
    }
    if (routing == Routing::kNone) id = -1;
    if (routing == Routing::kOneExpert) id = k == 0 ? favourite : -1;
    if (routing == Routing::kHalfEmpty && token / sizes.tokens % 2 == 1) id = -1;
    ids[i] = id;
  }
  return ids;
}

Expected Expect(const Case& test, uint64_t seed) {
  const Sizes& sizes = test.sizes;
  std::mt19937_64 random(seed);
  const size_t tokens = static_cast<size_t>(sizes.ranks) * sizes.tokens;
  const size_t rows = static_cast<size_t>(sizes.ranks) * sizes.capacity;
  Expected expected;
  expected.ids_in = DrawIds(sizes, test.routing, random);
  expected.plan = OraclePlan(sizes, expected.ids_in);
  expected.x = OriginRows(sizes, tokens, seed, false);
  expected.s = OriginGates(tokens * sizes.topk, seed + 1);
  const std::vector<uint32_t> poison(rows * sizes.payload_bytes() / 4, kPoison);
  expected.rows.resize(rows * sizes.payload_bytes());
  std::memcpy(expected.rows.data(), poison.data(), expected.rows.size());
  expected.row_s.resize(rows);
  std::memcpy(expected.row_s.data(), poison.data(), std::min(poison.size(), rows) * 4);
  OracleDispatch(sizes, expected.plan, expected.x, expected.s, expected.rows, expected.row_s);
  expected.rows_in = OriginRows(sizes, rows, seed + 2, true);
  expected.row_s_in = OriginGates(rows, seed + 3);
  expected.y.resize(tokens * sizes.payload_bytes());
  expected.s_out.resize(tokens * sizes.topk);
  OracleCombine(sizes, expected.plan, expected.rows_in, expected.row_s_in, expected.y,
                expected.s_out);
  return expected;
}

void CompareInts(const Case& test, const char* what, const std::vector<int32_t>& got,
                 const std::vector<int32_t>& want) {
  HARNESS_REQUIRE(got.size() == want.size(), std::string(what) + ": sizes differ");
  size_t differences = 0, first = 0;
  for (size_t i = got.size(); i-- > 0;) {
    if (got[i] != want[i]) differences++, first = i;
  }
  if (differences > 0) {
    Differ(test, what, first, static_cast<uint32_t>(got[first]), static_cast<uint32_t>(want[first]),
           differences);
  }
}

void CompareRows(const Case& test, const char* what, const std::vector<uint8_t>& got,
                 const std::vector<uint8_t>& want, bool nan_equal) {
  HARNESS_REQUIRE(got.size() == want.size(), std::string(what) + ": sizes differ");
  if (std::memcmp(got.data(), want.data(), got.size()) == 0) return;
  const bool bf16 = test.sizes.bf16;
  const size_t item = bf16 ? 2 : 4;
  size_t differences = 0, first = 0;
  uint32_t first_got = 0, first_want = 0;
  for (size_t i = got.size() / item; i-- > 0;) {
    uint32_t a = 0, b = 0;
    std::memcpy(&a, got.data() + i * item, item);
    std::memcpy(&b, want.data() + i * item, item);
    if (a == b || (nan_equal && IsNan(a, bf16) && IsNan(b, bf16))) continue;
    differences++, first = i, first_got = a, first_want = b;
  }
  if (differences > 0) {
    std::fprintf(stderr, "element %zu of row %zu\n", first % test.sizes.hidden,
                 first / test.sizes.hidden);
    Differ(test, what, first, first_got, first_want, differences);
  }
}

void CompareFloats(const Case& test, const char* what, const std::vector<float>& got,
                   const std::vector<float>& want) {
  std::vector<int32_t> got_bits(got.size()), want_bits(want.size());
  if (!got.empty()) std::memcpy(got_bits.data(), got.data(), got.size() * 4);
  if (!want.empty()) std::memcpy(want_bits.data(), want.data(), want.size() * 4);
  CompareInts(test, what, got_bits, want_bits);
}

std::vector<Case> CheckCases(uint32_t ranks) {
  std::vector<Case> cases;
  auto add = [&](const char* name, uint32_t nodes, uint32_t tokens, uint32_t topk, uint32_t local,
                 uint32_t hidden, bool bf16, Routing routing, uint32_t alignment, bool zero_tail,
                 double factor) {
    // Many ranks: fewer tokens and a bounded capacity, so that the host can hold all ranks' rows.
    if (ranks > 8) tokens = (tokens * 8 + ranks - 1) / ranks;
    if (ranks > 8 && factor == 0) factor = 2.5;
    Sizes sizes{ranks, nodes, tokens, topk, ranks * local, 0, alignment, hidden, bf16, zero_tail};
    sizes.capacity = WorstCapacity(sizes);
    if (factor > 0) {
      sizes.capacity = static_cast<uint32_t>(factor * tokens * topk);
      sizes.capacity = (sizes.capacity + alignment - 1) / alignment * alignment;
    }
    cases.push_back(
        {std::string(name) + " R=" + std::to_string(ranks) + " N=" + std::to_string(nodes), sizes,
         routing});
  };
  const uint32_t two = ranks % 2 == 0 ? 2 : 1;
  add("tiny bf16", 1, 1, 1, 1, 8, true, Routing::kUniform, 1, false, 0);
  add("tiny f32", 1, 3, 2, 2, 4, false, Routing::kUniform, 1, true, 0);
  add("no tokens", 1, 0, 2, 2, 64, true, Routing::kUniform, 4, true, 0);
  add("uniform", 1, 67, 8, 32, 1032, true, Routing::kUniform, 1, false, 0);
  add("uniform nodes", two, 67, 8, 32, 1032, true, Routing::kUniform, 1, false, 0);
  add("f32 nodes", two, 33, 6, 5, 260, false, Routing::kUniform, 8, true, 0);
  add("skewed overflow", two, 61, 8, 16, 136, true, Routing::kSkewed, 16, false, 0.9);
  add("overflow to nothing", 1, 40, 4, 4, 64, true, Routing::kSkewed, 128, true, 0.8);
  add("duplicates", two, 29, 16, 2, 200, true, Routing::kDuplicates, 1, false, 0);
  add("invalid", two, 50, 7, 3, 72, false, Routing::kInvalid, 4, false, 0);
  add("none", 1, 20, 4, 2, 64, true, Routing::kNone, 8, true, 0);
  add("one expert", 1, 45, 5, 3, 96, true, Routing::kOneExpert, 8, false, 0);
  add("half empty", two, 45, 5, 3, 96, false, Routing::kHalfEmpty, 1, false, 1.1);
  add("V3 rows", two, 24, 8, 256 / ranks, 7168, true, Routing::kUniform, 1, false, 0);
  add("V3 rows f32", 1, 9, 8, 256 / ranks, 7168, false, Routing::kUniform, 16, true, 0);
  add("widest", two, 5, 3, 2, 16384, false, Routing::kUniform, 1, false, 0);
  add("all experts", 1, 130, 8, 2048 / ranks, 64, true, Routing::kUniform, 1, false, 0);
  return cases;
}

}  // namespace harness
