// A group, as this process has it: its devices, its pool sets, and the launch of its calls.

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
#include "cuda_meeting.h"
#include "cuda_pool.h"
#include "status.h"

namespace jax_moe::cuda {

struct Topology {
  std::string description;  // what messages call the group
  uint32_t num_ranks = 1;
  uint32_t virtual_ranks = 1;
  std::vector<std::vector<int>> instances;  // CUDA ordinals in group order
  // For a group of several processes: which has each device, which is this one, which share
  // instances with it (itself included), and the most of them on one GPU.
  std::vector<std::vector<int>> processes = {};
  int process = 0;
  std::vector<int> members = {};  // ascending
  uint32_t processes_per_gpu = 1;

  bool spans_processes() const { return !processes.empty(); }
  bool is_local(size_t instance, size_t index) const {
    return processes.empty() || processes[instance][index] == process;
  }
};

class Group {
 public:
  // Opens the devices, loads the kernels and switches peer access on. No pool yet.
  static Status Create(Topology topology, const Timeouts& timeouts, std::shared_ptr<Group>* group);

  const Topology& topology() const { return topology_; }

  // Eager operations, one at a time. They may wait for the devices, and in a group of several
  // processes, whose processes must all make them, for each other: there `meeting` is needed.
  Status CheckCall(const Call& call);  // limits and launch shape
  // Per device; 0 if a pool set has room.
  uint64_t MissingBytes(const PoolSizes& sizes, int64_t lowering = 0);
  // Makes a pool set unless one has room. It takes the place of those that no call has used yet, so
  // that a program's plan, which is lowered first and needs little, shares its pool with the
  // exchanges: when the plan fails, they do. `lowering` numbers the program being lowered: which
  // sets are unused the processes do not see alike, but those made in this lowering are.
  Status Reserve(const PoolSizes& sizes, int64_t lowering = 0, Meeting* meeting = nullptr);
  Status Close(Meeting* meeting = nullptr);
  Status Rebuild(Meeting* meeting = nullptr);
  // Rebuild if closed or broken; not where other processes would have to as well.
  Status EnsureUsable();
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
  bool IsReplaceable(const PoolSet& set, int64_t lowering) const;
  PoolSizes GrowBy(const PoolSizes& sizes, int64_t lowering) const;
  // Puts the set in the place of those that it replaces, and returns these.
  std::vector<std::unique_ptr<PoolSet>> Publish(std::unique_ptr<PoolSet> set);
  void SetState(State state);
  Status Suspend();
  Status RebuildLocked();
  // What several processes do together, in cuda_group_processes.cc.
  Status ReserveTogether(const PoolSizes& sizes, int64_t lowering, Meeting* meeting);
  Status CloseTogether(Meeting* meeting);
  Status RebuildTogether(Meeting* meeting);
  // Agrees on a step, and frees orphans.
  Status Meet(Meeting* meeting, const std::string& phase, const Status& status);
  void Abandon(std::unique_ptr<PoolSet> set);  // makes it an orphan
  // Exports the pools of these sets unless `status` is an error, and opens those of the others.
  Status Share(Meeting& meeting, const std::vector<PoolSet*>& sets, Status status);
  Status Import(const std::vector<PoolSet*>& sets, const std::vector<std::string>& exports);
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
  // Not used here any more, but other processes may still have their pools open.
  std::vector<std::unique_ptr<PoolSet>> orphans_;
  std::set<std::tuple<PoolSet*, int, int, uint32_t>> known_faults_;  // instance, index, v
};

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_GROUP_H_
