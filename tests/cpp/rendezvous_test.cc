#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu_rendezvous.h"
#include "tests.h"
#include "world.h"

namespace jax_moe {
namespace {

using std::chrono::milliseconds;

CallSpec SmallSpec(int64_t group_key, int64_t ranks, int64_t virtual_ranks, int64_t nodes) {
  CallSpec spec;
  spec.group_key = group_key;
  spec.payload = group_key % 2 == 0 ? PayloadType::kFloat32 : PayloadType::kBFloat16;
  spec.num_ranks = ranks;
  spec.virtual_ranks = virtual_ranks;
  spec.num_nodes = nodes;
  spec.num_experts = 2 * ranks;
  spec.tokens = 3;
  spec.top_k = 2;
  spec.hidden = 9 + group_key % 5;
  spec.capacity = 3 * 2 * ranks;
  return spec;
}

// The answers to a set of arrivals, for a thread that waits for all.
class Answers {
 public:
  explicit Answers(int64_t count) : statuses_(count), left_(count) {}

  std::function<void(const Status&)> Slot(int64_t idx) {
    return [this, idx](const Status& status) {
      std::lock_guard lock(mutex_);
      CHECK_THAT(!statuses_[idx].has_value(), "completion " << idx << " ran twice");
      statuses_[idx] = status;
      --left_;
      changed_.notify_all();
    };
  }

  void Wait() { WaitUntilLeft(0); }
  void WaitUntilLeft(int64_t count) {
    std::unique_lock lock(mutex_);
    const bool done =
        changed_.wait_for(lock, std::chrono::seconds(30), [&] { return left_ <= count; });
    CHECK_THAT(done, left_ << " completions did not come");
  }
  bool has(int64_t idx) {
    std::lock_guard lock(mutex_);
    return statuses_[idx].has_value();
  }
  Status status(int64_t idx) {
    std::lock_guard lock(mutex_);
    return statuses_[idx].value();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::optional<Status>> statuses_;
  int64_t left_;
};

Arrival MakeArrival(World& world, OperationKind kind, int64_t run_id, int64_t device,
                    std::function<void(const Status&)> done, int64_t instance = 0) {
  Arrival arrival;
  arrival.run_id = run_id;
  arrival.instance = instance;
  arrival.device = device;
  arrival.spec = world.Spec(kind);
  arrival.buffers = world.Buffers(kind, device);
  arrival.done = std::move(done);
  return arrival;
}

// One call of all devices, from this thread, that must succeed.
void CallAll(CallSite& site, World& world, OperationKind kind, int64_t run_id) {
  const int64_t num_devices = world.spec().num_devices();
  Answers answers(num_devices);
  world.Poison(kind);
  for (int64_t d = 0; d < num_devices; ++d) {
    site.Join(MakeArrival(world, kind, run_id, d, answers.Slot(d)));
  }
  answers.Wait();
  for (int64_t d = 0; d < num_devices; ++d) {
    CHECK_THAT(answers.status(d).code == StatusCode::kOk, answers.status(d).message);
  }
  world.CheckResults(kind, "call of all");
}

void WaitUntilNothingWaits() {
  for (int i = 0; NumWaiting() != 0; ++i) {
    CHECK_THAT(i < 3000, NumWaiting() << " rendezvous are still watched");
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// A compiled program: call sites that do not depend on each other, each with its inputs.
struct Program {
  Program(const CallSpec& spec, int64_t instance, uint32_t seed) : instance(instance) {
    for (int i = 0; i < 6; ++i) {
      worlds.push_back(std::make_unique<World>(spec, Routing::kRandom, seed + i));
    }
  }

  int64_t instance;
  CallSite sites[6];
  std::vector<std::unique_ptr<World>> worlds;
  static OperationKind Kind(int site) { return kKinds[site % 3]; }
};

// What one device does in one run: joins all call sites in an order of its own, with pauses.
void RunDevice(Program& program, int64_t run_id, int64_t device, Answers& answers) {
  std::mt19937 random(static_cast<uint32_t>(run_id * 97 + device));
  std::vector<int> order = {0, 1, 2, 3, 4, 5};
  std::shuffle(order.begin(), order.end(), random);
  for (int site : order) {
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    program.sites[site].Join(MakeArrival(
        *program.worlds[site], Program::Kind(site), run_id, device,
        answers.Slot(site * program.worlds[0]->spec().num_devices() + device), program.instance));
  }
}

std::atomic<int64_t> g_next_run_id = 1;

void RunProgram(Program& program, int64_t rounds) {
  const int64_t num_devices = program.worlds[0]->spec().num_devices();
  for (int64_t round = 0; round < rounds; ++round) {
    for (int site = 0; site < 6; ++site) program.worlds[site]->Poison(Program::Kind(site));
    const int64_t run_id = g_next_run_id++;
    Answers answers(6 * num_devices);
    std::vector<std::thread> devices;
    for (int64_t d = 0; d < num_devices; ++d) {
      devices.emplace_back([&, d] { RunDevice(program, run_id, d, answers); });
    }
    for (std::thread& device : devices) device.join();
    answers.Wait();
    for (int site = 0; site < 6; ++site) {
      program.worlds[site]->CheckResults(Program::Kind(site), "stress");
    }
  }
}

}  // namespace

void TestStress(int64_t rounds) {
  struct Setting {
    int64_t key, ranks, virtual_ranks, nodes;
  };
  const Setting settings[] = {{100, 8, 1, 2}, {101, 6, 2, 3}, {102, 5, 1, 1}, {103, 4, 4, 2}};
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Program>> programs;
  for (const Setting& setting : settings) {
    RegisterGroup(setting.key, 60, "stress group");
    const CallSpec spec =
        SmallSpec(setting.key, setting.ranks, setting.virtual_ranks, setting.nodes);
    for (int64_t instance = 0; instance < 2; ++instance) {
      programs.push_back(std::make_unique<Program>(spec, instance, setting.key * 2 + instance));
    }
  }
  for (auto& program : programs) {
    threads.emplace_back([&program, rounds] { RunProgram(*program, rounds); });
  }
  for (std::thread& thread : threads) thread.join();
  WaitUntilNothingWaits();
}

void TestTimeoutRaces(int64_t rounds) {
  // Devices come about when the timeout ends: a call ends well for all, or for none.
  RegisterGroup(7, 0.001, "hasty group");
  World world(SmallSpec(7, 4, 1, 1), Routing::kRandom, 7);
  CallSite site;
  for (int64_t run_id = 1; run_id <= 20 * rounds; ++run_id) {
    world.Poison(OperationKind::kDispatch);
    Answers answers(4);
    std::vector<std::thread> devices;
    for (int64_t d = 0; d < 4; ++d) {
      devices.emplace_back([&, d] {
        std::mt19937 random(static_cast<uint32_t>(4 * run_id + d));
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 1200));
        site.Join(MakeArrival(world, OperationKind::kDispatch, run_id, d, answers.Slot(d)));
      });
    }
    for (std::thread& device : devices) device.join();
    answers.Wait();
    const bool well = answers.status(0).ok();
    for (int64_t d = 0; d < 4; ++d) {
      CHECK_THAT(answers.status(d).ok() == well, answers.status(d).message);
    }
    if (well) world.CheckResults(OperationKind::kDispatch, "race");
  }
  WaitUntilNothingWaits();
}

void TestRunsAhead() {
  RegisterGroup(1, 60, "group");
  World world(SmallSpec(1, 3, 1, 1), Routing::kRandom, 7);
  CallSite site;
  Answers answers(6);
  // Devices 0 and 1 come twice before device 2 comes once; other instances and runs do not mix in.
  for (int64_t call = 0; call < 2; ++call) {
    for (int64_t d = 0; d < 2; ++d) {
      site.Join(MakeArrival(world, OperationKind::kDispatch, 5, d, answers.Slot(3 * call + d)));
    }
  }
  Answers strangers(2);
  site.Join(MakeArrival(world, OperationKind::kDispatch, 6, 2, strangers.Slot(0)));
  site.Join(MakeArrival(world, OperationKind::kDispatch, 5, 2, strangers.Slot(1), 1));
  CHECK_THAT(!answers.has(0) && NumWaiting() == 4, NumWaiting());
  site.Join(MakeArrival(world, OperationKind::kDispatch, 5, 2, answers.Slot(2)));
  answers.WaitUntilLeft(3);
  CHECK_THAT(answers.has(0) && answers.has(1) && answers.has(2), "the first call ends first");
  site.Join(MakeArrival(world, OperationKind::kDispatch, 5, 2, answers.Slot(5)));
  answers.Wait();
  for (int i = 0; i < 6; ++i) CHECK_THAT(answers.status(i).code == StatusCode::kOk, i);
  world.CheckResults(OperationKind::kDispatch, "ahead");
  CloseGroup(1);
  strangers.Wait();
  WaitUntilNothingWaits();
}

void TestCompletions() {
  RegisterGroup(2, 60, "group");
  constexpr int64_t kDevices = 6;
  World world(SmallSpec(2, kDevices, 1, 1), Routing::kRandom, 7);
  CallSite site;
  // Each completion runs a program that goes on only when all the others have started.
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::thread::id> threads;
  int num_ended = 0;
  const auto done = [&](const Status& status) {
    CHECK_THAT(status.code == StatusCode::kOk, status.message);
    std::unique_lock lock(mutex);
    threads.insert(std::this_thread::get_id());
    changed.notify_all();
    const auto all = [&] { return threads.size() == kDevices; };
    CHECK_THAT(changed.wait_for(lock, std::chrono::seconds(30), all),
               "a completion waits behind another's");
    ++num_ended;
    changed.notify_all();
  };
  for (int64_t d = 0; d < kDevices; ++d) {
    site.Join(MakeArrival(world, OperationKind::kCombine, 1, d, done));
  }
  std::unique_lock lock(mutex);
  CHECK_THAT(
      changed.wait_for(lock, std::chrono::seconds(30), [&] { return num_ended == kDevices; }),
      num_ended);
  CHECK_THAT(!threads.contains(std::this_thread::get_id()), "completed inside the last arrival");
}

void TestMissingRank() {
  RegisterGroup(3, 0.2, "ExpertGroup(three)");
  World world(SmallSpec(3, 8, 2, 2), Routing::kRandom, 7);
  CallSite site;
  Answers answers(4);
  for (int64_t d : {0, 1, 3}) {
    site.Join(MakeArrival(world, OperationKind::kDispatch, 1, d, answers.Slot(d)));
  }
  answers.WaitUntilLeft(1);
  for (int64_t d : {0, 1, 3}) {
    const Status status = answers.status(d);
    CHECK_THAT(status.code == StatusCode::kDeadlineExceeded, status.message);
    CHECK_CONTAINS(status.message, "jax_moe_dispatch");
    CHECK_CONTAINS(status.message, "ExpertGroup(three)");
    CHECK_CONTAINS(status.message, "arrived ranks 0-3, 6-7");
    CHECK_CONTAINS(status.message, "MISSING ranks 4-5");
    CHECK_CONTAINS(status.message, "set_timeout");
  }
  // The late one learns it at once; other runs of the same call site are not touched.
  site.Join(MakeArrival(world, OperationKind::kDispatch, 1, 2, answers.Slot(2)));
  CHECK_THAT(answers.has(2), "the late device waits");
  CHECK_CONTAINS(answers.status(2).message, "came too late");
  for (int64_t run_id = 2; run_id < 200; ++run_id) {
    CallAll(site, world, OperationKind::kDispatch, run_id);
  }
  WaitUntilNothingWaits();
}

void TestTimeoutChanges() {
  RegisterGroup(4, 3600, "group");
  World world(SmallSpec(4, 2, 1, 1), Routing::kRandom, 7);
  CallSite site;
  Answers answers(3);
  site.Join(MakeArrival(world, OperationKind::kPlan, 1, 0, answers.Slot(0)));
  RegisterGroup(4, 0.05, "group");
  answers.WaitUntilLeft(2);
  CHECK_THAT(answers.status(0).code == StatusCode::kDeadlineExceeded, answers.status(0).message);

  RegisterGroup(4, 3600, "group");
  site.Join(MakeArrival(world, OperationKind::kPlan, 2, 1, answers.Slot(1)));
  CloseGroup(4);
  answers.WaitUntilLeft(1);
  CHECK_CONTAINS(answers.status(1).message, "was closed while ranks 1 waited for ranks 0");
  site.Join(MakeArrival(world, OperationKind::kPlan, 3, 1, answers.Slot(2)));
  CHECK_CONTAINS(answers.status(2).message, "group is closed: call rebuild() on it");
  RegisterGroup(4, 60, "group");
  CallAll(site, world, OperationKind::kPlan, 4);
  WaitUntilNothingWaits();
}

void TestDisagreement() {
  RegisterGroup(5, 60, "group");
  World world(SmallSpec(5, 3, 1, 1), Routing::kRandom, 7);
  CallSpec other_spec = world.spec();
  other_spec.hidden = 31;
  World other(other_spec, Routing::kRandom, 7);
  CallSite site;
  Answers answers(5);
  site.Join(MakeArrival(world, OperationKind::kCombine, 1, 0, answers.Slot(0)));
  site.Join(MakeArrival(other, OperationKind::kCombine, 1, 1, answers.Slot(1)));
  answers.WaitUntilLeft(3);
  for (int i : {0, 1}) {
    CHECK_THAT(answers.status(i).code == StatusCode::kInvalidArgument, answers.status(i).message);
    CHECK_CONTAINS(answers.status(i).message, "hidden=9,");
    CHECK_CONTAINS(answers.status(i).message, "hidden=31");
  }
  site.Join(MakeArrival(world, OperationKind::kCombine, 1, 2, answers.Slot(2)));
  CHECK_CONTAINS(answers.status(2).message, "the ranks of one call disagree");

  Arrival stranger = MakeArrival(world, OperationKind::kCombine, 2, 0, answers.Slot(3));
  stranger.device = 3;
  site.Join(std::move(stranger));
  CHECK_CONTAINS(answers.status(3).message, "not one of the group's 3 devices");
  stranger = MakeArrival(world, OperationKind::kCombine, 2, 0, answers.Slot(4));
  stranger.spec.group_key = 555;
  site.Join(std::move(stranger));
  CHECK_CONTAINS(answers.status(4).message,
                 "has not built the call's ExpertGroup, of 3 ranks on 1 nodes");
  CallAll(site, world, OperationKind::kCombine, 3);
  WaitUntilNothingWaits();
}

void TestNothingStays(int64_t calls) {
  RegisterGroup(6, 60, "group");
  World world(SmallSpec(6, 4, 1, 1), Routing::kRandom, 7);
  CallSite site;
  const auto peak_kib = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  for (int64_t run_id = 0; run_id < calls / 10; ++run_id) {
    CallAll(site, world, OperationKind::kDispatch, run_id);
  }
  const int64_t before = peak_kib();
  for (int64_t run_id = 0; run_id < calls; ++run_id) {
    CallAll(site, world, OperationKind::kDispatch, run_id);
  }
  // A sanitizer's own books grow; without one, not even an entry a call may stay.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  CHECK_THAT(peak_kib() - before < 1024 + calls / 40, peak_kib() - before << " KiB");
#else
  (void)before;
#endif
}

}  // namespace jax_moe
