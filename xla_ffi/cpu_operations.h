// plan, dispatch and combine over the buffers of all devices of a group, cut into chunks that any
// threads may run. Free of FFI types; knows nothing of how the ranks met.

#ifndef JAX_MOE_CPU_OPERATIONS_H_
#define JAX_MOE_CPU_OPERATIONS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace jax_moe {

enum class OperationKind : uint8_t { kPlan, kDispatch, kCombine };
enum class PayloadType : uint8_t { kNone, kFloat32, kBFloat16 };

// All that one device knows of a call before it meets the others; equal on all devices.
struct CallSpec {
  OperationKind kind = OperationKind::kPlan;
  PayloadType payload = PayloadType::kNone;  // kNone for plan
  int64_t group_key = 0;
  int64_t num_ranks = 1;
  int64_t virtual_ranks = 1;
  int64_t num_nodes = 1;
  int64_t num_experts = 1;
  int64_t alignment = 1;
  int64_t zero_tail = 1;
  int64_t tokens = 0;    // T, per rank
  int64_t top_k = 0;     // K
  int64_t hidden = 0;    // H, elements; 0 for plan
  int64_t capacity = 0;  // C, rows per rank

  bool operator==(const CallSpec&) const = default;

  int64_t num_devices() const { return num_ranks / virtual_ranks; }
  int64_t experts_per_rank() const { return num_experts / num_ranks; }
  int64_t ranks_per_node() const { return num_ranks / num_nodes; }
  int64_t element_bytes() const { return payload == PayloadType::kBFloat16 ? 2 : 4; }
  int64_t row_bytes() const { return hidden * element_bytes(); }
};

const char* OperationName(OperationKind kind);
std::string ToString(const CallSpec& spec);
// Returns what is wrong with the numbers, with the rule they break; empty if nothing is.
std::string Check(const CallSpec& spec);

// One device's buffers in the order of the custom call's operands (`where` left out) and results.
struct DeviceBuffers {
  std::array<const void*, 4> args = {};
  std::array<void*, 7> rets = {};
};

// The work of one call for all devices: phases in sequence, the chunks of a phase in any order on
// any threads. Once a chunk has found wrong input the rest may be skipped.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual int num_phases() const { return 1; }
  virtual int64_t num_chunks(int phase) const = 0;
  virtual void Run(int phase, int64_t chunk) = 0;

  // First error found; empty if none. To be read when all chunks have ended.
  const std::string& error() const { return error_; }

 protected:
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  void Fail(std::string message);

 private:
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  std::string error_;
};

// `devices[d]` are the buffers of device d of the group. `spec` must pass Check().
std::unique_ptr<Operation> MakeOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices);

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_OPERATIONS_H_
