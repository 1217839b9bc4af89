#include "group.h"

#include <algorithm>
#include <cstring>

namespace harness {

using jax_moe::ptx::ArraySlot;
using jax_moe::ptx::Params;
using jax_moe::ptx::PoolLayout;

namespace {

constexpr uint32_t kGuardPattern = 0x6b5a4f31;

CUfunction LoadKernel(const std::string& directory, const std::string& stem) {
  CUmodule module;
  CUfunction function;
  HARNESS_CHECK(driver.cuModuleLoad(&module, (directory + "/" + stem + ".cubin").c_str()));
  HARNESS_CHECK(driver.cuModuleGetFunction(&function, module, ("jax_moe_" + stem).c_str()));
  return function;
}

void CheckPattern(CUdeviceptr at, size_t bytes, uint32_t pattern, const std::string& what) {
  const auto words = Download<uint32_t>(at, bytes / 4);
  for (size_t i = 0; i < words.size(); i++) {
    HARNESS_REQUIRE(words[i] == pattern,
                    what + ": guard word " + std::to_string(i) + " overwritten");
  }
}

// [begin, end) of every guard band of a pool made with guard bands.
std::vector<std::pair<uint64_t, uint64_t>> GuardBands(const PoolLayout& layout) {
  std::vector<uint64_t> starts = {layout.chunk_flags};
  std::vector<uint64_t> sizes = {layout.room.chunk_flags};
  auto halves = [&](uint64_t offset, uint64_t stride, uint64_t bytes) {
    for (int half = 0; half < 2; half++) {
      starts.push_back(offset + half * stride);
      sizes.push_back(bytes);
    }
  };
  halves(layout.ids, layout.ids_stride, layout.room.ids);
  halves(layout.counts, layout.counts_stride, layout.room.counts);
  halves(layout.gates, layout.gates_stride, layout.room.gates);
  halves(layout.slots, layout.slots_stride, layout.room.slots);
  std::vector<std::pair<uint64_t, uint64_t>> bands;
  uint64_t end = ABI_POOL_HEAD_BYTES;
  for (size_t i = 0; i < starts.size(); i++) {
    bands.emplace_back(end, starts[i]);
    end = jax_moe::ptx::AlignUp(starts[i] + sizes[i], ABI_POOL_ALIGN);
  }
  bands.emplace_back(end, layout.size);
  return bands;
}

}  // namespace

std::vector<Device> OpenDevices(int count, const std::string& directory) {
  std::vector<Device> devices(count);
  for (int i = 0; i < count; i++) {
    Device& device = devices[i];
    device.ordinal = i;
    CUdevice handle;
    HARNESS_CHECK(driver.cuDeviceGet(&handle, i));
    HARNESS_CHECK(driver.cuDevicePrimaryCtxRetain(&device.context, handle));
    HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
    HARNESS_CHECK(driver.cuDeviceGetAttribute(&device.num_sms,
                                              CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle));
    HARNESS_CHECK(driver.cuStreamCreate(&device.stream, CU_STREAM_NON_BLOCKING));
    device.plan = LoadKernel(directory, "plan");
    device.dispatch = LoadKernel(directory, "dispatch");
    device.combine = LoadKernel(directory, "combine");
    const auto smem = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    const int plan_smem = static_cast<int>(jax_moe::ptx::PlanSmemBytes(ABI_MAX_EXPERTS));
    HARNESS_CHECK(driver.cuFuncSetAttribute(device.plan, smem, plan_smem));
    HARNESS_CHECK(driver.cuFuncSetAttribute(device.dispatch, smem, ABI_DISPATCH_SMEM_BYTES));
    HARNESS_CHECK(driver.cuFuncSetAttribute(device.combine, smem, ABI_COMBINE_SMEM_BYTES));
  }
  for (const Device& device : devices) {
    HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
    for (const Device& peer : devices) {
      if (peer.ordinal != device.ordinal)
        HARNESS_CHECK(driver.cuCtxEnablePeerAccess(peer.context, 0));
    }
  }
  return devices;
}

Output::Output(size_t bytes) : buffer_((bytes + 3) / 4 * 4 + 2 * kGuard), bytes_(bytes) {}

void Output::Poison(CUstream stream) const {
  HARNESS_CHECK(driver.cuMemsetD32Async(buffer_.ptr(), kPoison, buffer_.bytes() / 4, stream));
}

void Output::CheckGuards(const std::string& what) const {
  CheckPattern(buffer_.ptr(), kGuard, kPoison, what + " before");
  CheckPattern(buffer_.ptr() + buffer_.bytes() - kGuard, kGuard, kPoison, what + " after");
}

std::vector<const Output*> Arrays::outputs() const {
  return {&expert_ids, &positions, &sources, &arrivals, &group_sizes, &padded_group_sizes,
          &dropped,    &invalid,   &rows,    &row_s,    &y,           &s};
}

Group::Group(std::vector<Device> devices, uint32_t num_ranks, uint32_t virtual_ranks,
             const PoolLayout& layout)
    : devices_(std::move(devices)),
      num_ranks_(num_ranks),
      virtual_ranks_(virtual_ranks),
      layout_(layout) {
  // Ranks beyond the launched devices never run; their pools lie on the last device.
  for (uint32_t rank = 0; rank < num_ranks; rank++) {
    const size_t device = std::min<size_t>(rank / virtual_ranks, devices_.size() - 1);
    HARNESS_CHECK(driver.cuCtxSetCurrent(devices_[device].context));
    pools_.emplace_back(layout.size);
  }
  for (const Device& device : devices_) {
    HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
    std::vector<uint64_t> table;
    for (const DeviceBuffer& pool : pools_) table.push_back(pool.ptr());
    tables_.emplace_back(table.size() * 8);
    Upload(tables_.back().ptr(), table.data(), table.size());
    void* report;
    HARNESS_CHECK(driver.cuMemHostAlloc(&report, ABI_REPORT_BYTES,
                                        CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
    reports_.push_back(report);
  }
  Reset(0);
}

Group::~Group() {
  for (void* report : reports_) HARNESS_CHECK(driver.cuMemFreeHost(report));
}

void Group::Reset(uint64_t epoch) {
  Synchronize();
  // Control words but the epoch are zero, flags are `epoch`, guard bands hold their pattern, all
  // else is poison.
  std::vector<uint64_t> head((layout_.chunk_flags + layout_.room.chunk_flags) / 8, epoch);
  std::fill(head.begin() + 1, head.begin() + ABI_POOL_JOIN_FLAGS / 8, 0);
  for (const DeviceBuffer& pool : pools_) {
    HARNESS_CHECK(driver.cuMemsetD32(pool.ptr(), kPoison, layout_.size / 4));
    Upload(pool.ptr(), head.data(), head.size());
    for (const auto& [begin, end] : GuardBands(layout_)) {
      HARNESS_CHECK(driver.cuMemsetD32(pool.ptr() + begin, kGuardPattern, (end - begin) / 4));
    }
  }
  Synchronize();
  for (void* report : reports_) std::memset(report, 0, ABI_REPORT_BYTES);
  SetTimeouts(20'000'000'000ull, 10'000'000'000ull);
}

Arrays Group::MakeArrays(size_t device, const Sizes& sizes) const {
  HARNESS_CHECK(driver.cuCtxSetCurrent(devices_[device].context));
  const size_t v = virtual_ranks_, ids = static_cast<size_t>(sizes.tokens) * sizes.topk;
  const size_t capacity = sizes.capacity, payload = sizes.payload_bytes();
  Arrays arrays;
  arrays.ids_in = DeviceBuffer(v * ids * 4);
  arrays.x = DeviceBuffer(v * sizes.tokens * payload);
  arrays.s_in = DeviceBuffer(v * ids * 4);
  arrays.rows_in = DeviceBuffer(v * capacity * payload);
  arrays.row_s_in = DeviceBuffer(v * capacity * 4);
  arrays.expert_ids = Output(v * ids * 4);
  arrays.positions = Output(v * ids * 4);
  arrays.sources = Output(v * capacity * 4);
  arrays.arrivals = Output(v * sizes.ranks * ids * 4);
  arrays.group_sizes = Output(v * sizes.local_experts() * 4);
  arrays.padded_group_sizes = Output(v * sizes.local_experts() * 4);
  arrays.dropped = Output(v * sizes.local_experts() * 4);
  arrays.invalid = Output(v * 4);
  arrays.rows = Output(v * capacity * payload);
  arrays.row_s = Output(v * capacity * 4);
  arrays.y = Output(v * sizes.tokens * payload);
  arrays.s = Output(v * ids * 4);
  return arrays;
}

namespace {

void FillArrays(int operation, const Arrays& a, uint64_t* slots) {
  auto put = [&](int offset, CUdeviceptr ptr) { slots[ArraySlot(offset)] = ptr; };
  if (operation == ABI_OPERATION_PLAN) {
    put(ABI_PLAN_EXPERT_IDS_IN, a.ids_in.ptr());
    put(ABI_PLAN_EXPERT_IDS, a.expert_ids.ptr());
    put(ABI_PLAN_POSITIONS, a.positions.ptr());
    put(ABI_PLAN_SOURCES, a.sources.ptr());
    put(ABI_PLAN_ARRIVALS, a.arrivals.ptr());
    put(ABI_PLAN_GROUP_SIZES, a.group_sizes.ptr());
    put(ABI_PLAN_PADDED_GROUP_SIZES, a.padded_group_sizes.ptr());
    put(ABI_PLAN_DROPPED, a.dropped.ptr());
    put(ABI_PLAN_INVALID, a.invalid.ptr());
  } else if (operation == ABI_OPERATION_DISPATCH) {
    put(ABI_DISPATCH_X, a.x.ptr());
    put(ABI_DISPATCH_S, a.s_in.ptr());
    put(ABI_DISPATCH_EXPERT_IDS, a.expert_ids.ptr());
    put(ABI_DISPATCH_POSITIONS, a.positions.ptr());
    put(ABI_DISPATCH_SOURCES, a.sources.ptr());
    put(ABI_DISPATCH_ARRIVALS, a.arrivals.ptr());
    put(ABI_DISPATCH_PADDED_GROUP_SIZES, a.padded_group_sizes.ptr());
    put(ABI_DISPATCH_ROWS, a.rows.ptr());
    put(ABI_DISPATCH_ROW_S, a.row_s.ptr());
  } else {
    put(ABI_COMBINE_ROWS, a.rows_in.ptr());
    put(ABI_COMBINE_ROW_S, a.row_s_in.ptr());
    put(ABI_COMBINE_EXPERT_IDS, a.expert_ids.ptr());
    put(ABI_COMBINE_POSITIONS, a.positions.ptr());
    put(ABI_COMBINE_ARRIVALS, a.arrivals.ptr());
    put(ABI_COMBINE_Y, a.y.ptr());
    put(ABI_COMBINE_S, a.s.ptr());
  }
}

struct Shape {
  CUfunction function;
  uint32_t threads, smem;
};
Shape ShapeOf(const Device& device, int operation, const Sizes& sizes) {
  if (operation == ABI_OPERATION_PLAN) {
    return {device.plan, ABI_PLAN_THREADS, jax_moe::ptx::PlanSmemBytes(sizes.experts)};
  }
  if (operation == ABI_OPERATION_DISPATCH) {
    return {device.dispatch, ABI_DISPATCH_THREADS, ABI_DISPATCH_SMEM_BYTES};
  }
  return {device.combine, ABI_COMBINE_THREADS, ABI_COMBINE_SMEM_BYTES};
}

}  // namespace

void Group::Launch(size_t index, int operation, const Sizes& sizes, const Arrays& arrays,
                   const Tuning& tuning, CUstream stream) const {
  const Device& device = devices_[index];
  HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
  const Shape shape = ShapeOf(device, operation, sizes);
  const uint32_t most = std::max(1u, device.num_sms / virtual_ranks_);
  const uint32_t blocks =
      tuning.blocks_per_rank > 0 ? std::min(most, tuning.blocks_per_rank) : most;
  const uint32_t link = tuning.link_blocks > 0 ? std::min(blocks, tuning.link_blocks) : blocks;
  const uint32_t chunk =
      tuning.chunk_tokens > 0
          ? tuning.chunk_tokens
          : jax_moe::ptx::DefaultChunkTokens(operation, num_ranks_, sizes.tokens, blocks, link);
  jax_moe::ptx::CallShape call{num_ranks_,
                               virtual_ranks_,
                               static_cast<uint32_t>(index) * virtual_ranks_,
                               sizes.nodes,
                               sizes.tokens,
                               sizes.topk,
                               sizes.experts,
                               sizes.capacity,
                               sizes.alignment,
                               operation == ABI_OPERATION_PLAN ? 0 : sizes.payload_bytes(),
                               sizes.zero_tail,
                               sizes.bf16};
  HARNESS_REQUIRE(layout_.Fits(call), "the pool is too small for this call");
  Params params = MakeParams(call, layout_, blocks, link, chunk);
  params.pools = tables_[index].ptr();
  CUdeviceptr report_ptr;
  HARNESS_CHECK(driver.cuMemHostGetDevicePointer(&report_ptr, reports_[index], 0));
  params.report = report_ptr;
  FillArrays(operation, arrays, params.arrays);
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  attribute.value.cooperative = 1;
  CUlaunchConfig config{};
  config.gridDimX = blocks * virtual_ranks_;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = shape.threads;
  config.sharedMemBytes = shape.smem;
  config.hStream = stream != nullptr ? stream : device.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* arguments[] = {&params};
  HARNESS_CHECK(driver.cuLaunchKernelEx(&config, shape.function, arguments, nullptr));
}

void Group::Synchronize() const {
  for (const Device& device : devices_) {
    HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
    HARNESS_CHECK(driver.cuCtxSynchronize());
  }
}

void Group::CheckGuards(const std::string& what) const {
  for (uint32_t rank = 0; rank < num_ranks_; rank++) {
    for (const auto& [begin, end] : GuardBands(layout_)) {
      CheckPattern(pools_[rank].ptr() + begin, end - begin, kGuardPattern,
                   what + ": pool of rank " + std::to_string(rank));
    }
  }
}

void Group::SetTimeouts(uint64_t join_ns, uint64_t flight_ns) {
  for (size_t i = 0; i < reports_.size(); i++) {
    std::memcpy(report(i) + ABI_REPORT_JOIN_TIMEOUT_NS, &join_ns, 8);
    std::memcpy(report(i) + ABI_REPORT_FLIGHT_TIMEOUT_NS, &flight_ns, 8);
  }
}
void Group::SetHostAbort(uint32_t value) {
  for (size_t i = 0; i < reports_.size(); i++)
    std::memcpy(report(i) + ABI_REPORT_HOST_ABORT, &value, 4);
}
const jax_moe::ptx::Record& Group::record(size_t device, uint32_t virtual_rank) const {
  return reinterpret_cast<const jax_moe::ptx::Record*>(report(device) +
                                                       ABI_REPORT_RECORDS)[virtual_rank];
}
uint64_t Group::waited_ns(size_t device, uint32_t virtual_rank, int operation,
                          uint32_t peer) const {
  const size_t entry = (virtual_rank * ABI_NUM_OPERATIONS + operation - 1) * ABI_MAX_RANKS + peer;
  return reinterpret_cast<const uint64_t*>(report(device) + ABI_REPORT_WAITS)[entry];
}

}  // namespace harness
