// A group on the GPUs of this process: its devices, its pool sets, and the launch of its calls.

#ifndef JAX_MOE_CUDA_GROUP_H_
#define JAX_MOE_CUDA_GROUP_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_launch.h"
#include "cuda_pool.h"
#include "status.h"

namespace jax_moe::cuda {

struct Topology {
  std::string description;  // what messages call the group
  uint32_t num_ranks = 1;
  uint32_t virtual_ranks = 1;
  std::vector<std::vector<int>> instances;  // CUDA ordinals in group order
};

class Group {
 public:
  // Opens the devices, loads the kernels and switches peer access on. No pool yet.
  static Status Create(Topology topology, const Timeouts& timeouts, std::shared_ptr<Group>* group);

  const Topology& topology() const { return topology_; }

  // Eager operations, one at a time. They may wait for the devices.
  Status CheckCall(const Call& call);             // limits and launch shape
  uint64_t MissingBytes(const PoolSizes& sizes);  // per device; 0 if a pool set has room
  // Makes a pool set unless one has room. It takes the place of those that no call has used yet, so
  // that a program's plan, which is lowered first and needs little, shares its pool with the
  // exchanges: when the plan fails, they do.
  Status Reserve(const PoolSizes& sizes);
  Status Close();
  Status Rebuild();
  Status EnsureUsable();  // Rebuild if closed or broken
  void SetTimeouts(const Timeouts& timeouts);

  // What calls left in the reports; the group is broken from the first until Rebuild.
  std::vector<std::string> Faults();
  // Faults not given out by this function before; orders the group's other calls to end.
  std::vector<std::string> TakeNewFaults();
  // [instance][operation - 1][waiting rank][rank waited for], nanoseconds.
  std::vector<uint64_t> WaitedNs();

  // In a handler: looks the pool up, launches, and never waits. `arrays` are the call's operands
  // and results.
  Status Launch(int ordinal, Call call, const std::array<const void*, kNumArrays>& arrays,
                Stream stream);
  // Launches so far: fewer than calls where CUDA graphs replay them.
  int64_t num_launches() const { return num_launches_; }

 private:
  enum class State { kReady, kClosed, kChanging };
  // What handlers of one device read; held only while launching.
  struct Slot {
    std::mutex mutex;
    int ordinal = 0;
    int instance = 0;
    int index = 0;  // in the instance
    State state = State::kReady;
    std::vector<PoolSet*> pools;  // in order of creation: the first with room serves a call
  };

  Group(Topology topology, const Timeouts& timeouts)
      : topology_(std::move(topology)), timeouts_(timeouts) {}
  Status Open();
  PoolSet* FindRoom(const PoolSizes& sizes) const;
  PoolSizes GrowBy(const PoolSizes& sizes) const;
  void Publish(std::unique_ptr<PoolSet> set);
  void SetState(State state);
  Status Suspend();
  Status RebuildLocked();
  template <typename Function>
  void ForEachRecord(Function function);  // of (PoolSet*, instance, index, v, record)
  std::string Describe(const ptx::Record& record, int instance) const;

  const Topology topology_;
  std::vector<Instance> devices_;
  std::vector<std::unique_ptr<Slot>> slots_;  // [all devices]
  std::atomic<int64_t> num_launches_ = 0;
  std::mutex eager_mutex_;  // guards all below
  Timeouts timeouts_;
  bool closed_ = false;
  std::vector<std::unique_ptr<PoolSet>> pools_;
  std::set<std::tuple<PoolSet*, int, int, uint32_t>> known_faults_;  // instance, index, v
};

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_GROUP_H_
