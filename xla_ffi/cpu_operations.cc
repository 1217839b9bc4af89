#include "cpu_operations.h"

#include <limits>
#include <sstream>
#include <utility>

#include "cpu_blocks.h"

namespace jax_moe {

const char* OperationName(OperationKind kind) {
  switch (kind) {
    case OperationKind::kPlan:
      return "jax_moe_plan";
    case OperationKind::kDispatch:
      return "jax_moe_dispatch";
    case OperationKind::kCombine:
      return "jax_moe_combine";
  }
  return "jax_moe";
}

std::string ToString(const CallSpec& spec) {
  const char* payload = spec.payload == PayloadType::kNone      ? ""
                        : spec.payload == PayloadType::kFloat32 ? "float32, "
                                                                : "bfloat16, ";
  std::ostringstream out;
  out << OperationName(spec.kind) << "(" << payload << "ranks=" << spec.num_ranks
      << ", virtual_ranks=" << spec.virtual_ranks << ", nodes=" << spec.num_nodes
      << ", experts=" << spec.num_experts << ", tokens=" << spec.tokens << ", top_k=" << spec.top_k
      << ", hidden=" << spec.hidden << ", capacity=" << spec.capacity
      << ", alignment=" << spec.alignment << ", zero_tail=" << spec.zero_tail
      << ", group=" << spec.group_key << ")";
  return out.str();
}

std::string Check(const CallSpec& spec) {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  std::string wrong;
  const auto require = [&](bool holds, const char* rule) {
    if (!holds && wrong.empty()) wrong = ToString(spec) + ": " + rule;
  };
  require(spec.num_ranks >= 1 && spec.virtual_ranks >= 1 && spec.num_nodes >= 1 &&
              spec.num_experts >= 1 && spec.alignment >= 1,
          "ranks, virtual_ranks, nodes, experts and alignment must be at least 1");
  if (!wrong.empty()) return wrong;
  require(spec.num_ranks % spec.virtual_ranks == 0, "virtual_ranks must divide ranks");
  require(spec.num_ranks % spec.num_nodes == 0, "nodes must divide ranks");
  require(spec.num_experts % spec.num_ranks == 0, "ranks must divide experts");
  require(spec.zero_tail == 0 || spec.zero_tail == 1, "zero_tail must be 0 or 1");
  require(spec.capacity <= kMaxInt32, "capacity must be below 2^31 rows, as positions are int32");
  require(
      spec.tokens == 0 || spec.top_k == 0 || spec.num_ranks <= kMaxInt32 / spec.tokens / spec.top_k,
      "ranks * tokens * top_k must be below 2^31, as sources are int32");
  return wrong;
}

void Operation::Fail(std::string message) {
  std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = std::move(message);
  failed_.store(true, std::memory_order_relaxed);
}

std::unique_ptr<Operation> MakeOperation(const CallSpec& spec, std::vector<DeviceBuffers> devices) {
  switch (spec.kind) {
    case OperationKind::kPlan:
      return MakePlan(spec, std::move(devices));
    case OperationKind::kDispatch:
      return MakeDispatch(spec, std::move(devices));
    case OperationKind::kCombine:
      return MakeCombine(spec, std::move(devices));
  }
  return nullptr;
}

}  // namespace jax_moe
