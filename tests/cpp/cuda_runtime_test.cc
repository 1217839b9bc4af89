// Drives the CUDA runtime on a stand-in for the driver (fake_cuda.cc, its path is the argument);
// ends with 0 when all holds. Kernels do not run: what is launched is looked at, and the test
// writes what a kernel would report.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <thread>

#include "check.h"
#include "cuda_images.h"
#include "cuda_processes_test.h"
#include "cuda_registry.h"
#include "cuda_report.h"
#include "fake_cuda.h"

namespace jax_moe::cuda {

namespace {
const unsigned char kCubin[] = {1, 2, 3};
}  // namespace

// Instead of what the build embeds.
const KernelImage kKernelImages[kNumKernels] = {
    {"jax_moe_plan", "plan text", kCubin, sizeof(kCubin)},
    {"jax_moe_dispatch", "dispatch text", kCubin, sizeof(kCubin)},
    {"jax_moe_combine", "combine text", kCubin, sizeof(kCubin)}};

namespace {

constexpr Timeouts kTimeouts{60'000'000'000, 10'000'000'000};

FakeCudaSettings* settings;
FakeCudaState* state;

void CheckOk(const Status& status) { CHECK_THAT(status.ok(), status.message); }
void CheckFails(const Status& status, StatusCode code, std::initializer_list<const char*> parts) {
  CHECK_THAT(status.code == code, "code " << int(status.code) << ", " << status.message);
  for (const char* part : parts) CHECK_CONTAINS(status.message, part);
}

template <typename T>
T& At(uint64_t address) {
  return *reinterpret_cast<T*>(address);
}

void TestDriver(const char* path) {
  CheckFails(OpenDriver("/no/such/library.so"), StatusCode::kUnimplemented,
             {"/no/such/library.so", "install it"});
  CheckFails(OpenDriver("libm.so.6"), StatusCode::kUnimplemented, {"no function cu", "12.0"});
  void* fake = dlopen(path, RTLD_NOW);
  CHECK_THAT(fake != nullptr, dlerror());
  settings = reinterpret_cast<FakeCudaSettings* (*)()>(dlsym(fake, "FakeCuda_Settings"))();
  state = reinterpret_cast<FakeCudaState* (*)()>(dlsym(fake, "FakeCuda_State"))();
  settings->driver_version = 11080;
  CheckFails(OpenDriver(path), StatusCode::kUnimplemented, {"CUDA 11.8", "needs 12.0"});
  settings->driver_version = 13000;
  CheckOk(OpenDriver(path));
  CheckOk(OpenDriver("/no/such/library.so"));  // opened once
}

void TestDevices() {
  Device* device = nullptr;
  settings->compute_major = 8;
  CheckFails(Device::Get(0, &device), StatusCode::kUnimplemented,
             {"GPU 0 (Fake H200)", "capability 8.0", "need 9.0"});
  settings->compute_major = 9;
  settings->cubin_refused = settings->ptx_refused = 1;
  CheckFails(Device::Get(0, &device), StatusCode::kUnimplemented,
             {"CUDA 13.0", "refuses the PTX of jax_moe_plan", "needs CUDA 12.0", "ptxas says why"});
  settings->ptx_refused = 0;
  CheckOk(Device::Get(0, &device));  // machine code refused, text taken
  CHECK_THAT(!device->precompiled(), "");
  settings->cubin_refused = 0;
  CheckOk(Device::Get(1, &device));
  CHECK_THAT(device->precompiled() && device->num_sms() == 132, device->num_sms());
  // A later chip takes the text.
  settings->compute_major = 10;
  CheckOk(Device::Get(2, &device));
  CHECK_THAT(!device->precompiled(), "");
  settings->compute_major = 9;
  Device* again = nullptr;
  const int64_t modules = state->num_modules;
  CheckOk(Device::Get(2, &again));
  CHECK_THAT(again == device && state->num_modules == modules, "loaded twice");
}

void TestPeers() {
  std::shared_ptr<Group> group;
  settings->peers_refused = 1;
  const Topology topology{"pair", 2, 1, {{0, 1}}};
  CheckFails(Group::Create(topology, kTimeouts, &group), StatusCode::kUnimplemented,
             {"cannot reach each other's memory: 0 -> 1"});
  settings->peers_refused = 0;
  settings->peers_enabled = 0;
  CheckOk(Group::Create(topology, kTimeouts, &group));
  settings->peers_enabled = 1;
  CheckOk(Group::Create(topology, kTimeouts, &group));
}

// A call of the group of 4 devices x 2 virtual ranks below.
Call MakeCall(int operation) {
  Call call;
  call.operation = operation;
  call.shape.num_ranks = 4;
  call.shape.virtual_ranks = 2;
  call.shape.num_nodes = 1;
  call.shape.num_tokens = 64;
  call.shape.topk = 4;
  call.shape.num_experts = 16;
  call.shape.capacity = 256;
  call.shape.alignment = 8;
  call.shape.payload_bytes = operation == ABI_OPERATION_PLAN ? 0 : 512;
  call.shape.zero_tail = true;
  call.shape.bf16 = true;
  return call;
}

Status Limit(void (*change)(Call&)) {
  Call call = MakeCall(ABI_OPERATION_DISPATCH);
  change(call);
  return CheckLimits(call);
}

void TestLimits() {
  CheckOk(CheckLimits(MakeCall(ABI_OPERATION_DISPATCH)));
  const auto refused = [](void (*change)(Call&), std::initializer_list<const char*> parts) {
    CheckFails(Limit(change), StatusCode::kInvalidArgument, parts);
    CHECK_CONTAINS(Limit(change).message, "implementation=\"xla\"");
  };
  refused([](Call& c) { c.shape.num_ranks = 65; }, {"65 ranks", "1 to 64"});
  refused([](Call& c) { c.shape.num_experts = 18; }, {"18 experts on 4 ranks", "multiple"});
  refused([](Call& c) { c.shape.num_experts = 2052; }, {"2052 experts", "at most 2048"});
  refused([](Call& c) { c.shape.topk = 17; }, {"17 experts a token", "1 to 16"});
  refused([](Call& c) { c.shape.payload_bytes = 24; }, {"24 bytes", "multiple of 16"});
  refused([](Call& c) { c.shape.payload_bytes = 65552; }, {"65552 bytes", "at most 65536"});
  refused([](Call& c) { c.shape.num_tokens = 1u << 27; }, {"2147483648 (token, k) pairs"});
  refused([](Call& c) { c.shape.capacity = 1u << 31; }, {"capacity of 2147483648"});
  CheckOk(Limit([](Call& c) { c.shape.payload_bytes = 65536; }));
  CheckOk(Limit([](Call& c) { c.shape.topk = 16; }));
}

void TestLaunchShapes() {
  Device* device = nullptr;
  CheckOk(Device::Get(0, &device));
  LaunchShape shape;
  Call call = MakeCall(ABI_OPERATION_DISPATCH);
  CheckOk(ChooseLaunch({device}, call, &shape));
  CHECK_THAT(shape.blocks_per_rank == 66 && shape.link_blocks == 66, shape.blocks_per_rank);
  CheckOk(ChooseLaunch({device, device}, call, &shape));
  CHECK_THAT(shape.link_blocks == 16, shape.link_blocks);  // 32 SMs for 2 virtual ranks
  call.num_sms = 21;
  call.link_sms = 8;
  CheckOk(ChooseLaunch({device, device}, call, &shape));
  CHECK_THAT(shape.blocks_per_rank == 10 && shape.link_blocks == 4, shape.blocks_per_rank);
  call.num_sms = 133;
  CheckFails(ChooseLaunch({device}, call, &shape), StatusCode::kInvalidArgument,
             {"num_sms=133", "132 SMs"});
  call.num_sms = 1;
  CheckFails(ChooseLaunch({device}, call, &shape), StatusCode::kInvalidArgument,
             {"num_sms=1", "2 virtual ranks"});
  call.num_sms = call.link_sms = 0;
  call.shape.num_tokens = 4096;
  CheckOk(ChooseLaunch({device}, call, &shape));
  CHECK_THAT(shape.chunk_tokens == ptx::DefaultChunkTokens(ABI_OPERATION_DISPATCH, 4, 4096, 66, 66),
             shape.chunk_tokens);
}

std::shared_ptr<Group> group;
constexpr int64_t kKey = 77;
std::array<const void*, kNumArrays> arrays;

Status Launch(int ordinal, int operation) {
  return group->Launch(ordinal, MakeCall(operation), arrays, reinterpret_cast<Stream>(0x5750));
}

const ptx::Params& Launched() { return *reinterpret_cast<ptx::Params*>(state->params); }

void TestPools() {
  // Two instances of two devices, two ranks a device, as data=2, rank=2 would have them.
  CheckOk(RegisterGroup(kKey, {"the group", 4, 2, {{0, 1}, {2, 3}}}, kTimeouts));
  group = FindGroup(kKey);
  CHECK_THAT(group != nullptr && FindGroup(78) == nullptr, "");
  CheckFails(Launch(0, ABI_OPERATION_PLAN), StatusCode::kFailedPrecondition,
             {"no pool", "tokens=64, top_k=4, num_experts=16", "reserve"});
  const PoolSizes sizes{64, 4, 16, 512};
  const uint64_t bytes = LayoutOf(4, sizes).size;
  CHECK_THAT(group->MissingBytes(sizes) == 2 * bytes, group->MissingBytes(sizes));
  settings->memory_bytes = state->used_bytes[0] + 2 * bytes;  // but not what is to stay free
  CheckFails(
      group->Reserve(sizes), StatusCode::kResourceExhausted,
      {"the group", "GPU 0 (Fake H200)", "free beside XLA", "XLA_PYTHON_CLIENT_MEM_FRACTION"});
  for (uint64_t used : state->used_bytes) CHECK_THAT(used == 0, "a failed pool leaks " << used);
  settings->memory_bytes = uint64_t{1} << 32;
  // What no call has used yet is replaced by what has room for both.
  CheckOk(group->Reserve({128, 4, 16, 0}));
  const PoolSizes both{128, 4, 16, 512};
  CHECK_THAT(group->MissingBytes(sizes) == 2 * LayoutOf(4, both).size, "");
  CheckOk(group->Reserve(sizes));
  const uint64_t used = state->used_bytes[0];
  CHECK_THAT(used >= 2 * LayoutOf(4, both).size && used < 2 * LayoutOf(4, both).size + 65536, used);
  const int64_t allocations = state->num_allocations;
  CheckOk(group->Reserve({32, 2, 8, 256}));  // has room already
  CHECK_THAT(group->MissingBytes(sizes) == 0 && state->num_allocations == allocations, "");
  for (int device = 0; device < 4; ++device) {
    CHECK_THAT(state->used_bytes[device] >= 2 * bytes, state->used_bytes[device]);
  }
}

void TestLaunch() {
  for (int i = 0; i < kNumArrays; ++i) arrays[i] = reinterpret_cast<void*>(0x1000 + 16 * i);
  uint64_t pools[4][4];
  for (const int ordinal : {0, 1, 2, 3}) {
    CheckOk(Launch(ordinal, ABI_OPERATION_DISPATCH));
    CHECK_THAT(state->device == ordinal && state->cooperative && state->stream == 0x5750, "");
    CHECK_THAT(std::string(state->entry) == "jax_moe_dispatch", state->entry);
    CHECK_THAT(state->block == ABI_DISPATCH_THREADS && state->grid == 132, state->grid);
    CHECK_THAT(state->smem_bytes == ABI_DISPATCH_SMEM_BYTES, state->smem_bytes);
    const ptx::Params& params = Launched();
    CHECK_THAT(params.first_rank == (ordinal % 2) * 2u && params.num_ranks == 4, params.first_rank);
    CHECK_THAT(params.blocks_per_rank == 66 && params.link_blocks == 16, params.link_blocks);
    CHECK_THAT(params.capacity == 256 && params.payload_bytes == 512 && params.topk == 4, "");
    CHECK_THAT(params.flags == (ABI_FLAG_ZERO_TAIL | ABI_FLAG_BF16), params.flags);
    for (int i = 0; i < kNumArrays; ++i) CHECK_THAT(params.arrays[i] == 0x1000u + 16 * i, i);
    std::memcpy(pools[ordinal], reinterpret_cast<void*>(params.pools), sizeof(pools[ordinal]));
    CHECK_THAT(At<uint64_t>(params.report + ABI_REPORT_JOIN_TIMEOUT_NS) == kTimeouts.join_ns, "");
    CHECK_THAT(At<uint64_t>(params.report + ABI_REPORT_FLIGHT_TIMEOUT_NS) == kTimeouts.flight_ns,
               "");
  }
  // The devices of an instance see the same pools, the instances different ones, all zero.
  CHECK_THAT(std::equal(pools[0], pools[0] + 4, pools[1]), "");
  CHECK_THAT(std::equal(pools[2], pools[2] + 4, pools[3]), "");
  std::vector<uint64_t> all(pools[0], pools[0] + 4);
  all.insert(all.end(), pools[2], pools[2] + 4);
  std::sort(all.begin(), all.end());
  CHECK_THAT(std::unique(all.begin(), all.end()) == all.end(), "pools shared");
  const uint64_t bytes = LayoutOf(4, {128, 4, 16, 512}).size;
  for (const uint64_t pool : all) {
    for (uint64_t at = 0; at < bytes; at += 8) CHECK_THAT(At<uint64_t>(pool + at) == 0, at);
  }
  CheckFails(Launch(7, ABI_OPERATION_PLAN), StatusCode::kFailedPrecondition, {"no GPU 7"});
  CheckOk(Launch(0, ABI_OPERATION_PLAN));
  CHECK_THAT(state->smem_bytes == ptx::PlanSmemBytes(16) && Launched().chunk_tokens == 1, "");
}

// As a kernel of rank `rank` on that device would.
void Record(int ordinal, uint32_t v, const ptx::Record& record) {
  CheckOk(Launch(ordinal, ABI_OPERATION_COMBINE));
  auto& at = At<ptx::Record>(Launched().report + ABI_REPORT_RECORDS + v * sizeof(ptx::Record));
  at = record;
  std::atomic_ref(at.valid).store(1, std::memory_order_release);
}

void TestFaults() {
  // A call too large for the pool set in use gets another one.
  Call large = MakeCall(ABI_OPERATION_DISPATCH);
  large.shape.payload_bytes = 2048;
  CheckOk(group->Reserve({64, 4, 16, 2048}));
  CheckOk(group->Launch(0, large, arrays, nullptr));
  const uint64_t other_pool = At<uint64_t>(Launched().pools);
  CheckOk(Launch(0, ABI_OPERATION_DISPATCH));
  CHECK_THAT(At<uint64_t>(Launched().pools) != other_pool, "");
  CHECK_THAT(At<uint32_t>(other_pool + ABI_POOL_ABORT) == 0, "");
  CHECK_THAT(group->Faults().empty(), group->Faults()[0]);
  ptx::Record record{};
  record.operation = ABI_OPERATION_COMBINE;
  record.phase = ABI_PHASE_ARRIVE;
  record.rank = 2;
  record.peer = 1;
  record.index = 5;
  record.expected = 12;
  record.seen = 11;
  record.waited_ns = 10'100'000'000;
  Record(3, 0, record);
  // The monitor prints it by itself; Faults() repeats it until the group is rebuilt.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (int i = 0; i < 2; ++i) {
    const auto faults = group->Faults();
    CHECK_THAT(faults.size() == 1, faults.size());
    for (const char* part :
         {"jax_moe_combine of the group instance 1", "phase arrive", "rank 2 (GPU 3) waited 10.1 s",
          "part 5 of the data from rank 1 (GPU 2)", "expected 12, saw 11"}) {
      CHECK_CONTAINS(faults[0], part);
    }
  }
  CHECK_THAT(group->TakeNewFaults().empty(), "the monitor did not take it");
  // A second pool set of the group hears of it, in both instances.
  CHECK_THAT(At<uint32_t>(other_pool + ABI_POOL_ABORT) == 1 + 2, "");
  const Place place{"g", 0, 1, {0}, 4};
  record.phase = ABI_PHASE_JOIN;
  CHECK_CONTAINS(Describe(record, place), "phase join: rank 2 (GPU 0) waited 10.1 s for rank 1");
  record.phase = ABI_PHASE_OVERLAP;
  CHECK_CONTAINS(Describe(record, place), "another call of the group running");
  record.phase = ABI_PHASE_ABORTED;
  record.peer = ABI_HOST_ABORT_RANK;
  CHECK_CONTAINS(Describe(record, place), "gave up because the host had given up");
}

void TestRebuildAndClose() {
  CheckOk(Launch(0, ABI_OPERATION_PLAN));
  const uint64_t table = Launched().pools, report = Launched().report;
  const uint64_t pool = At<uint64_t>(table);
  At<uint64_t>(pool + ABI_POOL_EPOCH) = 9;
  At<uint64_t>(report + ABI_REPORT_WAITS) = 1234;
  const std::vector<uint64_t> waited = group->WaitedNs();
  CHECK_THAT(waited.size() == 2 * 3 * 4 * 4 && waited[0] == 1234, waited[0]);
  CheckOk(group->Rebuild());
  CHECK_THAT(group->Faults().empty() && group->WaitedNs()[0] == 0, "");
  // Captured graphs keep these addresses.
  CHECK_THAT(At<uint64_t>(table) == pool && At<uint64_t>(pool + ABI_POOL_EPOCH) == 0, "");
  CHECK_THAT(At<uint32_t>(report + ABI_REPORT_HOST_ABORT) == 0, "");
  group->SetTimeouts({5, 6});
  CHECK_THAT(At<uint64_t>(report + ABI_REPORT_JOIN_TIMEOUT_NS) == 5, "");

  const uint64_t used = state->used_bytes[0];
  CheckOk(group->Close());
  CheckOk(group->Close());
  const uint64_t pools =
      2 * LayoutOf(4, {128, 4, 16, 512}).size + 2 * LayoutOf(4, {64, 4, 16, 2048}).size;
  CHECK_THAT(state->used_bytes[0] + pools == used, "not freed");
  CHECK_THAT(At<uint32_t>(report + ABI_REPORT_HOST_ABORT) == 1, "");
  for (int rank = 0; rank < 4; ++rank) {
    const uint64_t tombstone = At<uint64_t>(table + 8 * rank);
    CHECK_THAT(At<uint32_t>(tombstone + ABI_POOL_ABORT) == 1 + ABI_HOST_ABORT_RANK, rank);
  }
  CheckFails(Launch(0, ABI_OPERATION_PLAN), StatusCode::kFailedPrecondition,
             {"closed", "rebuild()"});
  CHECK_CONTAINS(group->Faults()[0], "is closed");
  // Registering an equal group opens it again.
  CheckOk(RegisterGroup(kKey, {"the group", 4, 2, {{0, 1}, {2, 3}}}, kTimeouts));
  CheckOk(Launch(0, ABI_OPERATION_PLAN));
  CHECK_THAT(Launched().pools == table && group->Faults().empty(), "");
  CHECK_THAT(At<uint32_t>(At<uint64_t>(table) + ABI_POOL_ABORT) == 0, "");
  CHECK_THAT(At<uint32_t>(report + ABI_REPORT_HOST_ABORT) == 0, "");
}

// Handlers launch while another thread closes and rebuilds: an error or a launch, never anything
// else.
void TestLaunchesBesideRebuild() {
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (const int ordinal : {0, 1, 2, 3}) {
    threads.emplace_back([&, ordinal] {
      while (!done) {
        const Status status = Launch(ordinal, ABI_OPERATION_DISPATCH);
        CHECK_THAT(status.ok() || status.code == StatusCode::kFailedPrecondition, status.message);
      }
    });
  }
  for (int round = 0; round < 8; ++round) {
    CheckOk(group->Close());
    CheckOk(group->Rebuild());
    CheckOk(group->Reserve({64, 4, 16, 4096u + 16 * round}));
  }
  done = true;
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace jax_moe::cuda

int main(int argc, char** argv) {
  using namespace jax_moe::cuda;
  CHECK_THAT(argc == 2, "usage: cuda_runtime_test FAKE_LIBCUDA");
  TestDriver(argv[1]);
  TestDevices();
  TestPeers();
  TestLimits();
  TestLaunchShapes();
  TestPools();
  TestLaunch();
  TestFaults();
  TestRebuildAndClose();
  TestLaunchesBesideRebuild();
  TestProcesses(settings, state);
  StopMonitor();
  CHECK_THAT(state->misuses == 0, state->misuses);
  std::cout << "ok" << std::endl;
  return 0;
}
