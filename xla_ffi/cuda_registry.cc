#include "cuda_registry.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace jax_moe::cuda {

namespace {

constexpr auto kWatchPeriod = std::chrono::milliseconds(50);

struct Registry {
  std::mutex mutex;
  std::condition_variable stop_wanted;
  std::map<int64_t, std::shared_ptr<Group>> groups;
  std::thread monitor;
  bool stopping = false;
};

Registry& TheRegistry() {
  // Never destroyed: handlers may run until the process is gone.
  static auto* registry = new Registry;
  return *registry;
}

void Watch() {
  Registry& registry = TheRegistry();
  std::unique_lock<std::mutex> lock(registry.mutex);
  while (!registry.stop_wanted.wait_for(lock, kWatchPeriod, [&] { return registry.stopping; })) {
    const auto groups = registry.groups;
    lock.unlock();
    for (const auto& [key, group] : groups) {
      for (const std::string& fault : group->TakeNewFaults()) {
        // One write a line: the process may be about to be ended by JAX's heartbeat.
        std::fputs((fault + "\n").c_str(), stderr);
        std::fflush(stderr);
      }
    }
    lock.lock();
  }
}

}  // namespace

Status RegisterGroup(int64_t key, Topology topology, const Timeouts& timeouts) {
  if (const auto known = FindGroup(key)) {
    known->SetTimeouts(timeouts);
    return known->EnsureUsable();
  }
  std::shared_ptr<Group> group;
  JAX_MOE_RETURN_IF_ERROR(Group::Create(std::move(topology), timeouts, &group));
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.groups.emplace(key, std::move(group));
  if (!registry.monitor.joinable() && !registry.stopping) registry.monitor = std::thread(Watch);
  return {};
}

std::shared_ptr<Group> FindGroup(int64_t key) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.groups.find(key);
  return found == registry.groups.end() ? nullptr : found->second;
}

void StopMonitor() {
  Registry& registry = TheRegistry();
  {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.stopping = true;
  }
  registry.stop_wanted.notify_all();
  if (registry.monitor.joinable()) registry.monitor.join();
}

}  // namespace jax_moe::cuda
