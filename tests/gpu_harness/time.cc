#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>

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

// A full-size call of each operation with what the host knows of it.
struct Scene {
  Case test;
  PlanArrays plan;
  std::unique_ptr<Group> group;
  std::vector<Arrays> arrays;
};

// bf16 pairs between 1 and 2 in size, with random signs and mantissas.
void UploadNumbers(const DeviceBuffer& to, std::mt19937_64& random) {
  std::vector<uint32_t> words(to.bytes() / 4);
  for (uint32_t& word : words) {
    word = (static_cast<uint32_t>(random()) & 0x807f807fu) | 0x3f803f80u;
  }
  Upload(to.ptr(), words.data(), words.size());
}

Scene MakeScene(const std::vector<Device>& devices, uint32_t virtual_ranks, uint32_t tokens) {
  const uint32_t ranks = virtual_ranks * static_cast<uint32_t>(devices.size());
  Scene scene{{"time", {ranks, 1, tokens, 8, 256, 0, 1, 7168, true, false}, Routing::kUniform},
              {},
              nullptr,
              {}};
  Sizes& sizes = scene.test.sizes;
  sizes.capacity = ranks * tokens * std::min(sizes.topk, sizes.local_experts());
  const auto layout = jax_moe::ptx::PoolLayout::Make(ranks, tokens, sizes.topk, sizes.experts,
                                                     sizes.payload_bytes());
  scene.group = std::make_unique<Group>(devices, ranks, virtual_ranks, layout);
  std::mt19937_64 random(42);
  const auto ids = DrawIds(sizes, scene.test.routing, random);
  scene.plan = OraclePlan(sizes, ids);
  for (size_t i = 0; i < devices.size(); i++) {
    scene.arrays.push_back(scene.group->MakeArrays(i, sizes));
    UploadNumbers(scene.arrays[i].x, random);
    UploadNumbers(scene.arrays[i].s_in, random);
    const size_t count = scene.arrays[i].ids_in.bytes() / 4;
    Upload(scene.arrays[i].ids_in.ptr(), ids.data() + i * count, count);
  }
  return scene;
}

// Runs every operation once, combine on the rows that dispatch wrote.
void RunOnce(const Scene& scene, const Tuning& tuning) {
  const Group& group = *scene.group;
  const Sizes& sizes = scene.test.sizes;
  for (size_t i = 0; i < scene.arrays.size(); i++) {
    const Arrays& a = scene.arrays[i];
    const CUstream stream = group.devices()[i].stream;
    group.Launch(i, ABI_OPERATION_PLAN, sizes, a, tuning);
    group.Launch(i, ABI_OPERATION_DISPATCH, sizes, a, tuning);
    HARNESS_CHECK(driver.cuMemcpyDtoDAsync(a.rows_in.ptr(), a.rows.ptr(), a.rows.bytes(), stream));
    HARNESS_CHECK(
        driver.cuMemcpyDtoDAsync(a.row_s_in.ptr(), a.row_s.ptr(), a.row_s.bytes(), stream));
    group.Launch(i, ABI_OPERATION_COMBINE, sizes, a, tuning);
  }
  group.Synchronize();
}

// One vector of one device's array.
std::vector<uint8_t> Vectors(const Scene& scene, size_t device, CUdeviceptr array, size_t index) {
  const size_t bytes = scene.test.sizes.payload_bytes();
  HARNESS_CHECK(driver.cuCtxSetCurrent(scene.group->devices()[device].context));
  return Download<uint8_t>(array + index * bytes, bytes);
}

// One token: its rows are its vector, and its sum is the specification's for those rows.
void CheckToken(const Scene& scene, size_t token) {
  const Sizes& sizes = scene.test.sizes;
  const size_t bytes = sizes.payload_bytes(), v = scene.group->virtual_ranks();
  const size_t home = token / sizes.tokens / v, at_home = token - home * v * sizes.tokens;
  const auto x = Vectors(scene, home, scene.arrays[home].x.ptr(), at_home);
  // A call of this token alone: one token a rank, its row of choice k at place k.
  Sizes small = sizes;
  small.tokens = 1;
  small.capacity = sizes.topk;
  const size_t rank_of_token = token / sizes.tokens, ids = size_t{sizes.ranks} * sizes.topk;
  PlanArrays plan{
      std::vector<int32_t>(ids, -1), std::vector<int32_t>(ids, -1), {}, {}, {}, {}, {}, {}};
  std::vector<uint8_t> rows(ids * bytes), y(sizes.ranks * bytes);
  std::vector<float> row_s(ids), s(ids);
  for (uint32_t k = 0; k < sizes.topk; k++) {
    const size_t code = token * sizes.topk + k;
    const size_t rank = scene.plan.expert_ids[code] / sizes.local_experts(), device = rank / v;
    const size_t row = (rank - device * v) * sizes.capacity + scene.plan.positions[code];
    const auto got = Vectors(scene, device, scene.arrays[device].rows.ptr(), row);
    CompareRows(scene.test, "sampled row", got, x, false);
    plan.expert_ids[rank_of_token * sizes.topk + k] = scene.plan.expert_ids[code];
    plan.positions[rank_of_token * sizes.topk + k] = static_cast<int32_t>(k);
    std::copy(got.begin(), got.end(), rows.begin() + (rank * sizes.topk + k) * bytes);
  }
  OracleCombine(small, plan, rows, row_s, y, s);
  const std::vector<uint8_t> want(y.begin() + rank_of_token * bytes,
                                  y.begin() + (rank_of_token + 1) * bytes);
  CompareRows(scene.test, "sampled sum", Vectors(scene, home, scene.arrays[home].y.ptr(), at_home),
              want, true);
}

void Report(const Scene& scene, const Tuning& tuning, const char* name,
            const std::vector<int>& operations, const Bytes* bytes, double copy) {
  const Group& group = *scene.group;
  const double us = MicrosecondsPerCall(group, [&](size_t i, CUstream stream) {
    for (int operation : operations) {
      group.Launch(i, operation, scene.test.sizes, scene.arrays[i], tuning, stream);
    }
  });
  std::printf("  %-14s %8.1f us", name, us);
  if (bytes != nullptr) {
    const double all = bytes->tokens + 2 * (bytes->packets + bytes->own_packets) + bytes->rows;
    const double used = all - 2 * bytes->own_packets;
    std::printf(
        "  %5.2f GB necessary, %4.2f TB/s, %5.1f %% of copy (own packets not counted: %4.1f %%)",
        all * 1e-9, all / us * 1e-6, 100 * all / us * 1e-6 / copy, 100 * used / us * 1e-6 / copy);
    const double away = 1.0 - 1.0 / static_cast<double>(scene.arrays.size());
    if (away > 0) {
      std::printf(", link %3.0f GB/s", (bytes->packets + bytes->own_packets) * away / us * 1e-3);
    }
  }
  std::printf("\n");
}

}  // namespace

void RunTime(const std::vector<Device>& devices, uint32_t virtual_ranks, uint32_t tokens,
             const Tuning& tuning) {
  const Scene scene = MakeScene(devices, virtual_ranks, tokens);
  const Sizes& sizes = scene.test.sizes;
  RunOnce(scene, tuning);
  std::mt19937 random(11);
  for (int i = 0; i < 200; i++) CheckToken(scene, random() % (size_t{sizes.ranks} * tokens));
  static const double copy = CopyTerabytesPerSecond(*scene.group);  // once in a process
  const Bytes bytes = Count(sizes, scene.plan, static_cast<double>(devices.size()));
  std::printf("time: %u ranks on %zu devices, %u tokens a rank, H 7168, K 8 of 256, bf16; ",
              sizes.ranks, devices.size(), tokens);
  std::printf("blocks %u link %u chunk %u\n  copy %.2f TB/s, read + written; 200 tokens checked\n",
              tuning.blocks_per_rank, tuning.link_blocks, tuning.chunk_tokens, copy);
  Report(scene, tuning, "plan", {ABI_OPERATION_PLAN}, nullptr, copy);
  Report(scene, tuning, "dispatch", {ABI_OPERATION_DISPATCH}, &bytes, copy);
  Report(scene, tuning, "plan, dispatch", {ABI_OPERATION_PLAN, ABI_OPERATION_DISPATCH}, &bytes,
         copy);
  Report(scene, tuning, "combine", {ABI_OPERATION_COMBINE}, &bytes, copy);
  std::printf("  rank 0 waited for each peer in dispatch, us in all:");
  for (uint32_t peer = 0; peer < sizes.ranks; peer++) {
    const auto ns = scene.group->waited_ns(0, 0, ABI_OPERATION_DISPATCH, peer);
    std::printf(" %.0f", 1e-3 * static_cast<double>(ns));
  }
  std::printf("\n");
}

}  // namespace harness
