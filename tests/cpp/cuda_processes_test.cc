#include "cuda_processes_test.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_group.h"

namespace jax_moe::cuda {

namespace {

constexpr Timeouts kTimeouts{60'000'000'000, 10'000'000'000};
constexpr uint32_t kRanks = 4;  // two a process
const PoolSizes kPlan{128, 4, 16, 0}, kExchange{64, 4, 16, 512}, kBoth{128, 4, 16, 512};

FakeCudaSettings* settings;
FakeCudaState* state;

// Where the two meet; each joint call is an attempt of its own.
struct Place {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::map<int, std::string>> messages;
};

class ThreadMeeting : public Meeting {
 public:
  ThreadMeeting(Place& place, int attempt, int process)
      : place_(place), attempt_(attempt), process_(process) {}

  Status Gather(const std::string& phase, const std::string& mine,
                std::vector<std::string>* all) override {
    std::unique_lock<std::mutex> lock(place_.mutex);
    auto& messages = place_.messages[std::to_string(attempt_) + phase];
    messages[process_] = mine;
    place_.changed.notify_all();
    const auto limit = std::chrono::milliseconds(alone ? 10 : 20'000);
    if (!place_.changed.wait_for(lock, limit, [&] { return messages.size() == 2; })) {
      return {StatusCode::kDeadlineExceeded, "nobody else came to " + phase};
    }
    all->clear();
    for (const auto& [process, message] : messages) all->push_back(message);
    return {};
  }

  bool alone = false;

 private:
  Place& place_;
  int attempt_;
  int process_;
};

Status Close(int, Group& group, Meeting* meeting) { return group.Close(meeting); }

// GPU p is that of process p, with two ranks each.
const Topology kPair{"the shared group", kRanks, 2, {{0, 1}}, {{0, 1}}, 0, {0, 1}};

// The group as each of the two processes has it.
struct World {
  explicit World(Topology topology = kPair) {
    for (int p : {0, 1}) {
      topology.process = p;
      const Status status = Group::Create(topology, kTimeouts, &groups[p]);
      CHECK_THAT(status.ok(), status.message);
    }
  }

  ~World() { MustTogether(Close); }

  // Calls function(process, group, meeting) in both at once.
  template <typename Function>
  std::vector<Status> Together(Function function) {
    std::vector<Status> results(2);
    ++attempt;
    std::thread other([&] { results[1] = CallOne(1, function); });
    results[0] = CallOne(0, function);
    other.join();
    return results;
  }

  template <typename Function>
  Status CallOne(int process, Function function) {
    ThreadMeeting meeting(place, attempt, process);
    return function(process, *groups[process], &meeting);
  }

  template <typename Function>
  void MustTogether(Function function) {
    for (const Status& status : Together(function)) CHECK_THAT(status.ok(), status.message);
  }

  Place place;
  int attempt = 0;
  std::shared_ptr<Group> groups[2];
};

auto Reserve(PoolSizes sizes, int64_t lowering = 0) {
  return
      [=](int, Group& group, Meeting* meeting) { return group.Reserve(sizes, lowering, meeting); };
}
Status Rebuild(int, Group& group, Meeting* meeting) { return group.Rebuild(meeting); }

// The parameters of an exchange launched in that process.
ptx::Params Launched(World& world, int process, uint32_t payload_bytes = 512) {
  Call call;
  call.operation = ABI_OPERATION_COMBINE;
  call.shape = {kRanks, 2, 0, 1, 64, 4, 16, 256, 1, payload_bytes, true, true};
  const Status status = world.groups[process]->Launch(process, call, {}, nullptr);
  CHECK_THAT(status.ok(), status.message);
  CHECK_THAT(state->device == process, state->device);
  ptx::Params params;
  std::memcpy(&params, state->params, sizeof(params));
  CHECK_THAT(params.first_rank == 2u * process, params.first_rank);
  return params;
}

template <typename T>
T& At(uint64_t address) {
  return *reinterpret_cast<T*>(address);
}

// What one process writes to any rank's pool the other finds there.
void CheckSharedPools(World& world) {
  const uint64_t tables[] = {Launched(world, 0).pools, Launched(world, 1).pools};
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const uint64_t first = At<uint64_t>(tables[0] + 8 * rank);
    const uint64_t second = At<uint64_t>(tables[1] + 8 * rank);
    CHECK_THAT(first != second, "rank " << rank << " is not mapped twice");
    const uint64_t offset = ABI_POOL_JOIN_FLAGS + 8 * rank;
    CHECK_THAT(At<uint64_t>(first + offset) == 0, "pools start all zero");
    At<uint64_t>(first + offset) = 100 + rank;
    CHECK_THAT(At<uint64_t>(second + offset) == 100 + rank, rank);
  }
}

void CheckBothFail(const std::vector<Status>& results, const char* part) {
  for (const Status& status : results) {
    CHECK_THAT(!status.ok(), "");
    CHECK_CONTAINS(status.message, part);
  }
}

// Pools are shared, survive a rebuild in place, and are new after a close.
void TestSharing() {
  World world;
  world.MustTogether(Reserve(kExchange));
  CHECK_THAT(state->num_open == 4, state->num_open);
  CheckSharedPools(world);
  const uint64_t table = Launched(world, 0).pools, pool = At<uint64_t>(table + 8 * 2);
  const int64_t opened = state->num_opened;
  world.MustTogether(Rebuild);
  CheckSharedPools(world);
  CHECK_THAT(At<uint64_t>(table + 8 * 2) == pool && state->num_opened == opened, "opened again");

  const uint64_t used = state->used_bytes[0];
  world.MustTogether(Close);
  CHECK_THAT(state->num_open == 0, state->num_open);
  const uint64_t pool_bytes = ptx::AlignUp(LayoutOf(kRanks, kExchange).size, kSharedGranularity);
  CHECK_THAT(state->used_bytes[0] + 2 * pool_bytes == used, state->used_bytes[0]);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    CHECK_THAT(
        At<uint32_t>(At<uint64_t>(table + 8 * rank) + ABI_POOL_ABORT) == 1 + ABI_HOST_ABORT_RANK,
        rank);
  }
  CHECK_THAT(world.groups[0]->Close(nullptr).ok(), "closed already");
  CHECK_CONTAINS(world.groups[0]->Faults()[0], "is closed");
  world.MustTogether(Rebuild);
  CHECK_THAT(state->num_opened == opened + 4, "an old handle was used");
  CheckSharedPools(world);
}

// Sets made while one program is lowered become one, others stay, whatever has been launched.
void TestReplacement() {
  World world;
  const uint64_t before = state->used_bytes[0];
  world.MustTogether(Reserve(kPlan, 5));
  world.MustTogether(Reserve(kExchange, 5));
  const uint64_t pool = ptx::AlignUp(LayoutOf(kRanks, kBoth).size, kSharedGranularity);
  const uint64_t used = state->used_bytes[0] - before;
  CHECK_THAT(used >= 2 * pool && used < 2 * pool + kSharedGranularity, used);
  CHECK_THAT(state->num_open == 4, state->num_open);
  const uint64_t table = Launched(world, 0).pools;
  const PoolSizes large{64, 4, 16, 4096};
  CHECK_THAT(world.groups[1]->MissingBytes(large, 6) == 2 * LayoutOf(kRanks, large).size, "");
  world.MustTogether(Reserve(large, 6));
  CHECK_THAT(Launched(world, 0).pools == table, "the first with room serves");
  CHECK_THAT(Launched(world, 0, 4096).pools != table, "");
  CheckSharedPools(world);
  world.MustTogether(Rebuild);
  CheckSharedPools(world);
}

void TestFailures() {
  World world;
  const uint64_t before = state->used_bytes[0];
  CHECK_CONTAINS(world.groups[0]->Reserve(kPlan).message, "spans several processes");
  // One alone.
  ThreadMeeting lonely(world.place, -1, 0);
  lonely.alone = true;
  CHECK_CONTAINS(world.groups[0]->Reserve(kPlan, 0, &lonely).message, "nobody else came to begun");
  CHECK_THAT(state->used_bytes[0] == before, "allocated before the others came");
  // Sizes that differ.
  CheckBothFail(world.Together([](int process, Group& group, Meeting* meeting) {
    return group.Reserve(process == 0 ? kPlan : kExchange, 0, meeting);
  }),
                "has other pools than this one");
  // What one cannot do the other does not keep.
  settings->ipc_refused = 1;
  const auto refused = world.Together(Reserve(kExchange));
  CheckBothFail(refused, "cannot open the pool of rank");
  CHECK_CONTAINS(refused[0].message, "the shared group, pool for tokens=64");
  CHECK_CONTAINS(refused[0].message, "GPU 0 (Fake H200) cannot open the pool of rank 2");
  settings->ipc_refused = 0;
  settings->memory_bytes = before + 1;
  for (const Status& status : world.Together(Reserve(kExchange))) {
    CHECK_THAT(status.code == StatusCode::kResourceExhausted, status.message);
  }
  settings->memory_bytes = uint64_t{1} << 32;
  world.MustTogether(Reserve(kExchange));
  const uint64_t pool = ptx::AlignUp(LayoutOf(kRanks, kExchange).size, kSharedGranularity);
  CHECK_THAT(state->used_bytes[0] < before + 2 * pool + kSharedGranularity, "orphans were kept");
  CheckSharedPools(world);
  // A close that the other does not make keeps what the other may have open.
  ThreadMeeting closing(world.place, -2, 0);
  closing.alone = true;
  const uint64_t used = state->used_bytes[0];
  CHECK_CONTAINS(world.groups[0]->Close(&closing).message, "its pools stay allocated");
  CHECK_THAT(state->used_bytes[0] == used, "");
  ThreadMeeting rebuilding(world.place, -3, 0);
  rebuilding.alone = true;
  CHECK_THAT(!world.groups[0]->Rebuild(&rebuilding).ok(), "");
  CHECK_CONTAINS(world.groups[0]->Faults()[0], "is closed");
  world.MustTogether(Rebuild);
  CheckSharedPools(world);
}

void TestFaultsNameTheProcess() {
  World world;
  world.MustTogether(Reserve(kExchange));
  auto& record = At<ptx::Record>(Launched(world, 1).report + ABI_REPORT_RECORDS);
  record.operation = ABI_OPERATION_DISPATCH;
  record.phase = ABI_PHASE_JOIN;
  record.rank = 2;
  record.peer = 1;
  record.waited_ns = 3'000'000'000;
  std::atomic_ref(record.valid).store(1, std::memory_order_release);
  CHECK_THAT(world.groups[0]->Faults().empty(), "");
  const auto faults = world.groups[1]->TakeNewFaults();
  CHECK_THAT(faults.size() == 1, faults.size());
  CHECK_CONTAINS(faults[0],
                 "rank 2 (GPU 1 of process 1) waited 3 s for rank 1 (GPU 0 of process 0)");
  CHECK_THAT(world.groups[1]->WaitedNs().size() == 3 * kRanks * kRanks, "");
}

// Every GPU of a process opens the pools of the other process, and none of its own process.
void TestSeveralGpusEach() {
  World world({"four GPUs", kRanks, 1, {{0, 1, 2, 3}}, {{0, 0, 1, 1}}, 0, {0, 1}});
  world.MustTogether(Reserve(kExchange));
  CHECK_THAT(state->num_open == 4 * 2, state->num_open);
  Call call;
  call.operation = ABI_OPERATION_DISPATCH;
  call.shape = {kRanks, 1, 0, 1, 64, 4, 16, 256, 1, 512, true, true};
  uint64_t pools[kRanks][kRanks];  // [device][rank]
  for (int device = 0; device < 4; ++device) {
    const Status status = world.groups[device / 2]->Launch(device, call, {}, nullptr);
    CHECK_THAT(status.ok(), status.message);
    ptx::Params params;
    std::memcpy(&params, state->params, sizeof(params));
    std::memcpy(pools[device], reinterpret_cast<void*>(params.pools), sizeof(pools[device]));
  }
  for (uint32_t device = 0; device < kRanks; ++device) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const bool same = pools[device][rank] == pools[rank][rank];
      CHECK_THAT(same == (device / 2 == rank / 2), device << " sees " << rank);
      const uint64_t flag = ABI_POOL_JOIN_FLAGS + 8 * device;
      At<uint64_t>(pools[device][rank] + flag) = 10 * device + rank;
      CHECK_THAT(At<uint64_t>(pools[rank][rank] + flag) == 10 * device + rank, rank);
    }
  }
  CHECK_CONTAINS(world.groups[0]->Launch(2, call, {}, nullptr).message, "no GPU 2");
}

class OwnMeeting : public Meeting {
  Status Gather(const std::string&, const std::string& mine,
                std::vector<std::string>* all) override {
    *all = {mine};
    return {};
  }
};

// Each process has an instance of its own: nothing is opened.
void TestInstancesApart() {
  const Topology topology{"apart", 2, 1, {{0, 1}, {2, 3}}, {{0, 0}, {1, 1}}, 0, {0}};
  std::shared_ptr<Group> group;
  CHECK_THAT(Group::Create(topology, kTimeouts, &group).ok(), "");
  OwnMeeting meeting;
  CHECK_THAT(group->Reserve(kExchange, 0, &meeting).ok() && state->num_open == 0, "");
  Call call;
  call.shape = {2, 1, 0, 1, 64, 4, 16, 256, 1, 0, true, true};
  CHECK_THAT(group->CheckCall(call).ok() && group->Launch(1, call, {}, nullptr).ok(), "");
  CHECK_CONTAINS(group->Launch(2, call, {}, nullptr).message, "no GPU 2");
  CHECK_THAT(group->WaitedNs().size() == 2 * 3 * 2 * 2, "");
  CHECK_THAT(group->Rebuild(&meeting).ok() && group->Close(&meeting).ok(), "");
}

void TestProcessesOfOneGpu() {
  Device* device = nullptr;
  CHECK_THAT(Device::Get(0, &device).ok(), "");
  Call call;
  call.operation = ABI_OPERATION_DISPATCH;
  call.shape = {kRanks, 2, 0, 1, 64, 4, 16, 256, 1, 512, true, true};
  LaunchShape shape;
  CHECK_THAT(ChooseLaunch({device, nullptr}, call, &shape, 2).ok(), "");
  CHECK_THAT(shape.blocks_per_rank == 33 && shape.link_blocks == 16, shape.blocks_per_rank);
  call.num_sms = 67;
  CHECK_CONTAINS(ChooseLaunch({device, nullptr}, call, &shape, 2).message,
                 "66 SMs for each of its processes");
}

}  // namespace

void TestProcesses(FakeCudaSettings* fake_settings, FakeCudaState* fake_state) {
  settings = fake_settings;
  state = fake_state;
  settings->ipc_same_process = 1;
  TestSharing();
  TestReplacement();
  TestFailures();
  TestFaultsNameTheProcess();
  TestSeveralGpusEach();
  TestInstancesApart();
  TestProcessesOfOneGpu();
  settings->ipc_same_process = 0;
}

}  // namespace jax_moe::cuda
