// Random calls whose every byte says where it came from, and the comparisons that read it back.
#ifndef JAX_MOE_TESTS_GPU_HARNESS_CASES_H_
#define JAX_MOE_TESTS_GPU_HARNESS_CASES_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "oracle.h"

namespace harness {

// How expert ids are drawn.
enum class Routing { kUniform, kSkewed, kDuplicates, kInvalid, kNone, kOneExpert, kHalfEmpty };
const char* Name(Routing routing);

struct Case {
  std::string name;
  Sizes sizes;
  Routing routing;
};

// Operands of one call of each operation and what the specification makes of them, stacked over
// ranks.
struct Expected {
  std::vector<int32_t> ids_in;
  PlanArrays plan;
  std::vector<uint8_t> x;
  std::vector<float> s;
  std::vector<uint8_t> rows;  // dispatch
  std::vector<float> row_s;
  std::vector<uint8_t> rows_in;  // combine
  std::vector<float> row_s_in;
  std::vector<uint8_t> y;
  std::vector<float> s_out;
};

std::vector<int32_t> DrawIds(const Sizes& sizes, Routing routing, std::mt19937_64& random);
Expected Expect(const Case& test, uint64_t seed);

// The byte that outputs and guard bands are filled with before every call.
constexpr uint32_t kPoison = 0xa5c3e187;

// Ends the program with a message that names the first difference. `nan_equal`: NaN of any bits
// equals NaN.
void CompareInts(const Case& test, const char* what, const std::vector<int32_t>& got,
                 const std::vector<int32_t>& want);
void CompareRows(const Case& test, const char* what, const std::vector<uint8_t>& got,
                 const std::vector<uint8_t>& want, bool nan_equal);
void CompareFloats(const Case& test, const char* what, const std::vector<float>& got,
                   const std::vector<float>& want);

std::vector<Case> CheckCases(uint32_t ranks);

}  // namespace harness

#endif  // JAX_MOE_TESTS_GPU_HARNESS_CASES_H_
