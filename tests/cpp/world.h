// A call of all devices of a group: random inputs, the buffers, and the oracle's answers.

#ifndef JAX_MOE_TESTS_WORLD_H_
#define JAX_MOE_TESTS_WORLD_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cpu_operations.h"
#include "oracle.h"

namespace jax_moe {

inline constexpr OperationKind kKinds[] = {OperationKind::kPlan, OperationKind::kDispatch,
                                           OperationKind::kCombine};

// How the tokens choose their experts.
enum class Routing { kRandom, kOneExpert, kNone, kOutOfRange };

// Buffers of one operation for all devices, laid out as the custom call has them.
class World {
 public:
  World(CallSpec spec, Routing routing, uint32_t seed);

  // The operation's spec: the world's with this kind.
  CallSpec Spec(OperationKind kind) const;
  DeviceBuffers Buffers(OperationKind kind, int64_t device);
  std::vector<DeviceBuffers> AllBuffers(OperationKind kind);
  // Overwrites the results with garbage, so that what nobody writes shows.
  void Poison(OperationKind kind);
  // Ends the program if a result is not the oracle's.
  void CheckResults(OperationKind kind, const std::string& what) const;

  const CallSpec& spec() const { return spec_; }

 private:
  template <typename T>
  using Blocks = std::vector<std::vector<T>>;  // by device

  Blocks<char> Pack(const std::vector<oracle::Payload>& by_rank) const;
  template <typename T>
  Blocks<T> Merge(const Blocks<T>& by_rank) const;
  template <typename T>
  void CheckEqual(const char* name, const Blocks<T>& got, const Blocks<T>& want,
                  const std::string& what) const;
  void CheckRows(const std::string& what) const;
  void CheckY(const std::string& what) const;

  CallSpec spec_;
  Blocks<int32_t> ids_, got_ids_, want_ids_, got_positions_, want_positions_;
  Blocks<int32_t> got_sources_, want_sources_, got_sizes_, want_sizes_, got_padded_, want_padded_;
  Blocks<int32_t> got_dropped_, want_dropped_, got_invalid_, want_invalid_;
  Blocks<char> x_, got_rows_, want_rows_, rows_, got_y_, want_y_;
  Blocks<float> s_, got_row_s_, want_row_s_, row_s_, got_s_, want_s_;
};

}  // namespace jax_moe

#endif  // JAX_MOE_TESTS_WORLD_H_
