#include <algorithm>
#include <cstdio>
#include <functional>

#include "run.h"

namespace harness {
namespace {

constexpr int kChain = 10;  // calls in one graph
constexpr int kReplays = 5;

// Microseconds of one call: the median over replays of a graph of kChain calls, the slowest device.
double MicrosecondsPerCall(const Group& group,
                           const std::function<void(size_t, CUstream)>& enqueue) {
  std::vector<CUgraphExec> graphs;
  std::vector<CUevent> starts, ends;
  for (size_t i = 0; i < group.devices().size(); i++) {
    const Device& device = group.devices()[i];
    HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
    CUgraph graph;
    HARNESS_CHECK(driver.cuStreamBeginCapture(device.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (int call = 0; call < kChain; call++) enqueue(i, device.stream);
    HARNESS_CHECK(driver.cuStreamEndCapture(device.stream, &graph));
    graphs.emplace_back();
    HARNESS_CHECK(driver.cuGraphInstantiate(&graphs.back(), graph, 0));
    HARNESS_CHECK(driver.cuGraphDestroy(graph));
    starts.emplace_back();
    ends.emplace_back();
    HARNESS_CHECK(driver.cuEventCreate(&starts.back(), CU_EVENT_DEFAULT));
    HARNESS_CHECK(driver.cuEventCreate(&ends.back(), CU_EVENT_DEFAULT));
  }
  std::vector<double> times;
  for (int replay = 0; replay < kReplays + 2; replay++) {
    for (size_t i = 0; i < graphs.size(); i++) {
      const Device& device = group.devices()[i];
      HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
      HARNESS_CHECK(driver.cuEventRecord(starts[i], device.stream));
      HARNESS_CHECK(driver.cuGraphLaunch(graphs[i], device.stream));
      HARNESS_CHECK(driver.cuEventRecord(ends[i], device.stream));
    }
    double slowest = 0;
    for (size_t i = 0; i < graphs.size(); i++) {
      float milliseconds;
      HARNESS_CHECK(driver.cuCtxSetCurrent(group.devices()[i].context));
      HARNESS_CHECK(driver.cuEventSynchronize(ends[i]));
      HARNESS_CHECK(driver.cuEventElapsedTime(&milliseconds, starts[i], ends[i]));
      slowest = std::max(slowest, 1e3 * milliseconds / kChain);
    }
    if (replay >= 2) times.push_back(slowest);
  }
  for (CUgraphExec graph : graphs) HARNESS_CHECK(driver.cuGraphExecDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Bytes that must move per device, packets to other ranks and packets to the own rank apart.
struct Bytes {
  double rows, packets, own_packets, tokens;
};
Bytes Count(const Sizes& sizes, const PlanArrays& plan, double devices) {
  Bytes bytes{};
  for (size_t token = 0; token < static_cast<size_t>(sizes.ranks) * sizes.tokens; token++) {
    uint64_t seen = 0;
    for (uint32_t k = 0; k < sizes.topk; k++) {
      const size_t code = token * sizes.topk + k;
      if (plan.positions[code] < 0) continue;
      bytes.rows++;
      const uint32_t rank = plan.expert_ids[code] / sizes.local_experts();
      if (seen >> rank & 1) continue;
      seen |= 1ull << rank;
      (rank == token / sizes.tokens ? bytes.own_packets : bytes.packets)++;
    }
  }
  bytes.tokens = static_cast<double>(sizes.ranks) * sizes.tokens;
  const double scale = sizes.payload_bytes() / devices;
  return {bytes.rows * scale, bytes.packets * scale, bytes.own_packets * scale,
          bytes.tokens * scale};
}

// The faster of copies in a graph and copies straight into the stream, which may take different
// engines.
double CopyTerabytesPerSecond(const Group& group) {
  const size_t bytes = 2ull << 30;
  const Device& device = group.devices()[0];
  HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
  DeviceBuffer from(bytes), to(bytes);
  std::vector<uint32_t> words(bytes / 4);
  std::mt19937 random(3);
  for (uint32_t& word : words) word = static_cast<uint32_t>(random());
  Upload(from.ptr(), words.data(), words.size());
  auto copy = [&](CUstream stream) {
    HARNESS_CHECK(driver.cuMemcpyDtoDAsync(to.ptr(), from.ptr(), bytes, stream));
  };
  double us = MicrosecondsPerCall(group, [&](size_t index, CUstream stream) {
    if (index == 0) copy(stream);
  });
  CUevent start, end;
  HARNESS_CHECK(driver.cuCtxSetCurrent(device.context));
  HARNESS_CHECK(driver.cuEventCreate(&start, CU_EVENT_DEFAULT));
  HARNESS_CHECK(driver.cuEventCreate(&end, CU_EVENT_DEFAULT));
  copy(device.stream);
  HARNESS_CHECK(driver.cuEventRecord(start, device.stream));
  for (int i = 0; i < kChain; i++) copy(device.stream);
  HARNESS_CHECK(driver.cuEventRecord(end, device.stream));
  HARNESS_CHECK(driver.cuEventSynchronize(end));
  float milliseconds;
  HARNESS_CHECK(driver.cuEventElapsedTime(&milliseconds, start, end));
  std::printf("  copy in a graph %.2f, in a stream %.2f TB/s\n", 2.0 * bytes / us * 1e-6,
              2.0 * bytes * kChain / milliseconds * 1e-9);
  us = std::min(us, 1e3 * milliseconds / kChain);
  return 2.0 * bytes / us * 1e-6;
}

// Rows and sums of a sample of tokens, against the operands read back from the device.
void CheckSample(const Group& group, const Case& test, const PlanArrays& plan, size_t index,
                 const Arrays& arrays) {
  const Sizes& sizes = test.sizes;
  const size_t bytes = sizes.payload_bytes(), v = group.virtual_ranks();
  HARNESS_CHECK(driver.cuCtxSetCurrent(group.devices()[index].context));
  std::mt19937 random(11);
  for (int i = 0; i < 500; i++) {
    const size_t row = random() % (v * sizes.capacity);
    const int32_t code = plan.sources[index * v * sizes.capacity + row];
    const size_t token = code / sizes.topk;
    if (code < 0 || token / sizes.tokens / v != index) continue;
    const auto got = Download<uint8_t>(arrays.rows.ptr() + row * bytes, bytes);
    const auto want =
        Download<uint8_t>(arrays.x.ptr() + (token - index * v * sizes.tokens) * bytes, bytes);
    CompareRows(test, "sampled row", got, want, false);
  }
}

}  // namespace

void RunTime(const std::vector<Device>& devices, uint32_t virtual_ranks, uint32_t tokens,
             const Tuning& tuning) {
  const uint32_t ranks = virtual_ranks * static_cast<uint32_t>(devices.size());
  Case test{"time", {ranks, 1, tokens, 8, 256, 0, 1, 7168, true, false}, Routing::kUniform};
  Sizes& sizes = test.sizes;
  sizes.capacity = ranks * tokens * std::min(sizes.topk, sizes.local_experts());
  const auto layout = jax_moe::ptx::PoolLayout::Make(ranks, tokens, sizes.topk, sizes.experts,
                                                     sizes.payload_bytes());
  Group group(devices, ranks, virtual_ranks, layout);
  std::mt19937_64 random(42);
  const auto ids = DrawIds(sizes, test.routing, random);
  const PlanArrays plan = OraclePlan(sizes, ids);
  std::vector<Arrays> arrays;
  for (size_t i = 0; i < devices.size(); i++) {
    arrays.push_back(group.MakeArrays(i, sizes));
    std::vector<uint32_t> words(arrays[i].x.bytes() / 4);
    // bf16 pairs near 1 with random mantissas
    for (uint32_t& word : words)
      word = (static_cast<uint32_t>(random()) & 0x807f807fu) | 0x3f803f80u;
    Upload(arrays[i].x.ptr(), words.data(), words.size());
    Upload(arrays[i].s_in.ptr(), words.data(), arrays[i].s_in.bytes() / 4);
    const size_t count = arrays[i].ids_in.bytes() / 4;
    Upload(arrays[i].ids_in.ptr(), ids.data() + i * count, count);
  }
  for (size_t i = 0; i < devices.size(); i++) {
    group.Launch(i, ABI_OPERATION_PLAN, sizes, arrays[i], tuning);
    group.Launch(i, ABI_OPERATION_DISPATCH, sizes, arrays[i], tuning);
  }
  group.Synchronize();
  for (size_t i = 0; i < devices.size(); i++) {
    CheckSample(group, test, plan, i, arrays[i]);
    // combine reads the rows that dispatch wrote
    const Device& device = devices[i];
    HARNESS_CHECK(driver.cuMemcpyDtoDAsync(arrays[i].rows_in.ptr(), arrays[i].rows.ptr(),
                                           arrays[i].rows.bytes(), device.stream));
    HARNESS_CHECK(driver.cuMemcpyDtoDAsync(arrays[i].row_s_in.ptr(), arrays[i].row_s.ptr(),
                                           arrays[i].row_s.bytes(), device.stream));
    HARNESS_CHECK(driver.cuStreamSynchronize(device.stream));
  }
  static const double copy = CopyTerabytesPerSecond(group);  // once in a process
  const Bytes bytes = Count(sizes, plan, static_cast<double>(devices.size()));
  std::printf(
      "time: %u ranks on %zu devices, %u tokens a rank, H 7168, K 8 of 256, bf16; blocks %u link "
      "%u chunk %u\n",
      ranks, devices.size(), tokens, tuning.blocks_per_rank, tuning.link_blocks,
      tuning.chunk_tokens);
  std::printf("  copy                %8.2f TB/s, read + written\n", copy);
  const double all = bytes.tokens + 2 * (bytes.packets + bytes.own_packets) + bytes.rows;
  const double used = all - 2 * bytes.own_packets;
  auto measure = [&](const char* name, std::vector<int> operations, bool moves) {
    const double us = MicrosecondsPerCall(group, [&](size_t i, CUstream stream) {
      for (int operation : operations) group.Launch(i, operation, sizes, arrays[i], tuning, stream);
    });
    std::printf("  %-14s %8.1f us", name, us);
    if (moves) {
      std::printf(
          "  %5.2f GB necessary, %4.2f TB/s, %4.1f %% of copy (own packets not counted: %4.1f %%)",
          all * 1e-9, all / us * 1e-6, 100 * all / us * 1e-6 / copy, 100 * used / us * 1e-6 / copy);
    }
    if (moves && devices.size() > 1) {
      const double away = 1.0 - 1.0 / static_cast<double>(devices.size());
      std::printf(", link %3.0f GB/s", (bytes.packets + bytes.own_packets) * away / us * 1e-3);
    }
    std::printf("\n");
  };
  measure("plan", {ABI_OPERATION_PLAN}, false);
  measure("dispatch", {ABI_OPERATION_DISPATCH}, true);
  measure("plan, dispatch", {ABI_OPERATION_PLAN, ABI_OPERATION_DISPATCH}, true);
  measure("combine", {ABI_OPERATION_COMBINE}, true);
  for (uint32_t peer = 0; peer < ranks; peer++) {
    if (peer == 0) std::printf("  rank 0 waited for each peer in dispatch, us in all:");
    std::printf(" %.0f",
                1e-3 * static_cast<double>(group.waited_ns(0, 0, ABI_OPERATION_DISPATCH, peer)));
  }
  std::printf("\n");
}

}  // namespace harness
