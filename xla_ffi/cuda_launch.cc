#include "cuda_launch.h"

#include <algorithm>
#include <limits>

namespace jax_moe::cuda {

namespace {

// Blocks that push over the links, where there are links: about 32 SMs saturate NVLink.
constexpr uint32_t kLinkSms = 32;
constexpr uint64_t kInt32Rows = uint64_t{1} << 31;

std::string Text(uint64_t value) { return std::to_string(value); }

Status Refuse(int operation, const std::string& what) {
  return {StatusCode::kInvalidArgument, "jax_moe_" + std::string(OperationName(operation)) + ": " +
                                            what + "; or use implementation=\"xla\""};
}

}  // namespace

Status CheckLimits(const Call& call) {
  const ptx::CallShape& shape = call.shape;
  const auto refuse = [&](const std::string& what) { return Refuse(call.operation, what); };
  if (shape.num_ranks < 1 || shape.num_ranks > ABI_MAX_RANKS) {
    return refuse(Text(shape.num_ranks) + " ranks, but a group of the ptx kernels has 1 to " +
                  Text(ABI_MAX_RANKS) + ": build smaller groups");
  }
  if (shape.num_experts > ABI_MAX_EXPERTS || shape.num_experts % shape.num_ranks != 0) {
    return refuse(Text(shape.num_experts) + " experts on " + Text(shape.num_ranks) +
                  " ranks, but the experts must be a multiple of the ranks and at most " +
                  Text(ABI_MAX_EXPERTS));
  }
  if (shape.topk < 1 || shape.topk > ABI_MAX_TOPK) {
    return refuse(Text(shape.topk) + " experts a token, but the ptx kernels take 1 to " +
                  Text(ABI_MAX_TOPK));
  }
  const uint32_t payload = shape.payload_bytes;
  if (payload % 16 != 0 || payload > ABI_MAX_PAYLOAD_BYTES) {
    return refuse("a token of " + Text(payload) +
                  " bytes, but hidden times the item size must be a multiple of 16 bytes and at "
                  "most " +
                  Text(ABI_MAX_PAYLOAD_BYTES) + ": pad the hidden axis");
  }
  const uint64_t ids = uint64_t{shape.num_ranks} * shape.num_tokens * shape.topk;
  const uint64_t slack = uint64_t{shape.alignment} * (shape.num_experts / shape.num_ranks);
  if (ids + slack >= kInt32Rows || shape.capacity >= kInt32Rows) {
    return refuse(Text(ids) + " (token, k) pairs in the group, " + Text(slack) +
                  " rows of alignment and a capacity of " + Text(shape.capacity) +
                  " rows, but the first two together and the third must each be < 2**31: use "
                  "fewer tokens a call");
  }
  return {};
}

Status ChooseLaunch(const std::vector<Device*>& devices, const Call& call, LaunchShape* shape,
                    uint32_t processes_per_gpu) {
  int resident = std::numeric_limits<int>::max(), num_sms = resident;
  for (Device* device : devices) {
    if (device == nullptr) continue;
    int blocks = 0;
    JAX_MOE_RETURN_IF_ERROR(
        device->ResidentBlocks(call.operation, call.shape.num_experts, &blocks));
    resident = std::min(resident, blocks);
    num_sms = std::min(num_sms, device->num_sms());
  }
  resident /= static_cast<int>(processes_per_gpu);
  num_sms /= static_cast<int>(processes_per_gpu);
  const uint32_t virtual_ranks = call.shape.virtual_ranks;
  if (call.num_sms > num_sms || call.num_sms < 0) {
    return Refuse(call.operation, "num_sms=" + std::to_string(call.num_sms) +
                                      ", but the device has " + Text(num_sms) + " SMs" +
                                      (processes_per_gpu > 1 ? " for each of its processes" : "") +
                                      ": ask for at most that, or None");
  }
  const int asked = call.num_sms > 0 ? static_cast<int>(call.num_sms) : num_sms;
  const uint32_t blocks = std::min(asked, resident);
  if (blocks < virtual_ranks) {
    return Refuse(call.operation,
                  "num_sms=" + Text(asked) + " and " + Text(resident) +
                      " blocks that fit on the device, but its " + Text(virtual_ranks) +
                      " virtual ranks need a block each: raise num_sms or use fewer virtual ranks");
  }
  shape->kernel = ShapeOf(call.operation, call.shape.num_experts);
  shape->blocks_per_rank = blocks / virtual_ranks;
  uint32_t link = shape->blocks_per_rank;
  if (call.operation != ABI_OPERATION_PLAN) {
    if (call.link_sms > 0) {
      link = static_cast<uint32_t>(call.link_sms) / virtual_ranks;
    } else if (devices.size() > 1) {
      link = kLinkSms / virtual_ranks;
    }
  }
  shape->link_blocks = std::clamp(link, 1u, shape->blocks_per_rank);
  shape->chunk_tokens =
      ptx::DefaultChunkTokens(call.operation, call.shape.num_ranks, call.shape.num_tokens,
                              shape->blocks_per_rank, shape->link_blocks);
  return {};
}

Status LaunchKernel(const Device& device, int operation, uint32_t virtual_ranks,
                    const LaunchShape& shape, ptx::Params params, Stream stream) {
  LaunchAttribute cooperative;
  cooperative.id = kLaunchCooperative;
  cooperative.value.cooperative = 1;
  LaunchConfig config;
  config.grid_x = virtual_ranks * shape.blocks_per_rank;
  config.block_x = shape.kernel.threads;
  config.dynamic_smem_bytes = shape.kernel.smem_bytes;
  config.stream = stream;
  config.attributes = &cooperative;
  config.num_attributes = 1;
  void* arguments[] = {&params};
  JAX_MOE_CUDA_ENTER(device.context());
  JAX_MOE_CUDA_RETURN_IF_ERROR(
      driver().cuLaunchKernelEx(&config, device.kernel(operation), arguments, nullptr));
  return {};
}

}  // namespace jax_moe::cuda
