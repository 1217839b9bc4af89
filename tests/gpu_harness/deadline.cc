#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "run.h"

namespace harness {
namespace {

constexpr uint32_t kVirtual = 2;
constexpr uint32_t kRanks = 4;  // ranks 2 and 3 never run

struct Scene {
  Case test;
  std::unique_ptr<Group> group;
  Arrays arrays;
};

Scene MakeScene(const std::vector<Device>& devices) {
  Sizes sizes{kRanks, 1, 40, 4, 8, 0, 4, 64, true, false};
  sizes.capacity = WorstCapacity(sizes);
  const auto layout = jax_moe::ptx::PoolLayout::Make(kRanks, 64, 8, 64, 4096, 4096);
  Scene scene{{"deadline", sizes, Routing::kUniform}, nullptr, {}};
  const std::vector<Device> one(devices.begin(), devices.begin() + 1);
  scene.group = std::make_unique<Group>(one, kRanks, kVirtual, layout);
  scene.arrays = scene.group->MakeArrays(0, sizes);
  for (const Output* output : scene.arrays.outputs()) output->Poison(devices[0].stream);
  return scene;
}

// Dispatch and combine need a plan in which every rank has rows: the oracle's, uploaded.
void UploadPlan(const Scene& scene) {
  const Expected expected = Expect(scene.test, 3);
  UploadOperands(*scene.group, 0, scene.test, expected, scene.arrays);
  auto put = [](const Output& to, const std::vector<int32_t>& stacked) {
    Upload(to.ptr(), stacked.data(), to.bytes() / 4);
  };
  put(scene.arrays.expert_ids, expected.plan.expert_ids);
  put(scene.arrays.positions, expected.plan.positions);
  put(scene.arrays.sources, expected.plan.sources);
  put(scene.arrays.arrivals, expected.plan.arrivals);
  put(scene.arrays.padded_group_sizes, expected.plan.padded_group_sizes);
}

double Seconds(const Scene& scene, int operation, const Tuning& tuning = {4, 4, 2}) {
  const auto start = std::chrono::steady_clock::now();
  scene.group->Launch(0, operation, scene.test.sizes, scene.arrays, tuning);
  HARNESS_CHECK(driver.cuStreamSynchronize(scene.group->devices()[0].stream));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void RequireAll(const Output& output, uint32_t pattern, const char* what) {
  const auto words = Download<uint32_t>(output.ptr(), output.bytes() / 4);
  for (uint32_t word : words) HARNESS_REQUIRE(word == pattern, std::string(what) + " not filled");
}

void RequireFilled(const Scene& scene, int operation) {
  const Arrays& a = scene.arrays;
  if (operation == ABI_OPERATION_PLAN) {
    for (const Output* output : {&a.expert_ids, &a.positions, &a.sources, &a.arrivals}) {
      RequireAll(*output, 0xffffffffu, "plan");
    }
    for (const Output* output : {&a.group_sizes, &a.padded_group_sizes, &a.dropped, &a.invalid}) {
      RequireAll(*output, 0, "plan");
    }
  } else if (operation == ABI_OPERATION_DISPATCH) {
    RequireAll(a.rows, 0x7fc07fc0u, "rows");
    RequireAll(a.row_s, 0x7fc00000u, "row_s");
  } else {
    RequireAll(a.y, 0x7fc07fc0u, "y");
    RequireAll(a.s, 0x7fc00000u, "s");
  }
  for (const Output* output : a.outputs()) output->CheckGuards("deadline output");
}

// Rank v's record names this phase and, if it is the first cause, a rank that never ran.
void RequireRecord(const Scene& scene, int operation, uint32_t phase) {
  bool cause = false;
  for (uint32_t v = 0; v < kVirtual; v++) {
    const auto& record = scene.group->record(0, v);
    std::printf(
        "  record: operation %u phase %u rank %u peer %u index %u expected %llu seen %llu waited "
        "%.1f ms\n",
        record.operation, record.phase, record.rank, record.peer, record.index,
        static_cast<unsigned long long>(record.expected),
        static_cast<unsigned long long>(record.seen), static_cast<double>(record.waited_ns) * 1e-6);
    HARNESS_REQUIRE(record.valid == 1 && record.rank == v, "a rank did not report");
    HARNESS_REQUIRE(record.operation == static_cast<uint32_t>(operation),
                    "wrong operation in the record");
    if (record.phase == ABI_PHASE_ABORTED && phase != ABI_PHASE_ABORTED) continue;
    HARNESS_REQUIRE(record.phase == phase, "wrong phase in the record");
    const bool waited = phase == ABI_PHASE_JOIN || phase == ABI_PHASE_ARRIVE;
    HARNESS_REQUIRE(!waited || record.peer >= kVirtual, "the record names a rank that ran");
    cause = true;
  }
  HARNESS_REQUIRE(cause, "no record names the cause");
}

void TimeOut(Scene& scene, int operation, bool joined) {
  scene.group->Reset(0);
  UploadPlan(scene);
  const uint64_t short_ns = 30'000'000, long_ns = 3'000'000'000;
  scene.group->SetTimeouts(joined ? long_ns : short_ns, joined ? short_ns : long_ns);
  if (joined) {
    const uint64_t epoch = 1;
    for (uint32_t v = 0; v < kVirtual; v++) {
      for (uint32_t peer = kVirtual; peer < kRanks; peer++) {
        Upload(scene.group->pool(v) + ABI_POOL_JOIN_FLAGS + peer * ABI_FLAG_BYTES, &epoch, 1);
      }
    }
  }
  const double seconds = Seconds(scene, operation);
  HARNESS_REQUIRE(seconds > 0.025 && seconds < 1.0,
                  "the deadline was not kept: " + std::to_string(seconds));
  RequireFilled(scene, operation);
  RequireRecord(scene, operation, joined ? ABI_PHASE_ARRIVE : ABI_PHASE_JOIN);
  // The group stays broken: the next call fills its outputs at once.
  HARNESS_REQUIRE(Seconds(scene, ABI_OPERATION_COMBINE) < 0.025, "a broken group waits");
  RequireFilled(scene, ABI_OPERATION_COMBINE);
}

void HostAbort(Scene& scene) {
  scene.group->Reset(0);
  UploadPlan(scene);
  std::thread aborter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    scene.group->SetHostAbort(1);
  });
  const double seconds = Seconds(scene, ABI_OPERATION_DISPATCH);
  aborter.join();
  HARNESS_REQUIRE(seconds < 2.0, "the host's abort was not seen");
  RequireFilled(scene, ABI_OPERATION_DISPATCH);
  RequireRecord(scene, ABI_OPERATION_DISPATCH, ABI_PHASE_ABORTED);
}

// A second kernel of the same group on another stream while the first waits.
void Overlap(Scene& scene) {
  scene.group->Reset(0);
  UploadPlan(scene);
  CUstream other;
  HARNESS_CHECK(driver.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  scene.group->Launch(0, ABI_OPERATION_DISPATCH, scene.test.sizes, scene.arrays, {4, 4, 2});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  scene.group->Launch(0, ABI_OPERATION_COMBINE, scene.test.sizes, scene.arrays, {4, 4, 2}, other);
  scene.group->Synchronize();
  RequireFilled(scene, ABI_OPERATION_DISPATCH);
  RequireFilled(scene, ABI_OPERATION_COMBINE);
  RequireRecord(scene, ABI_OPERATION_COMBINE, ABI_PHASE_OVERLAP);
}

}  // namespace

void RunDeadline(const std::vector<Device>& devices) {
  Scene scene = MakeScene(devices);
  for (int operation = 1; operation <= ABI_NUM_OPERATIONS; operation++) {
    TimeOut(scene, operation, false);
    TimeOut(scene, operation, true);
  }
  HostAbort(scene);
  Overlap(scene);
  // Life after it: a group of the ranks that run, in the same process.
  RunCheck({devices[0]}, kVirtual);
  std::printf("deadline: join, arrive, host abort and overlap reported and filled\n");
}

}  // namespace harness
