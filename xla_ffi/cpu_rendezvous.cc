#include "cpu_rendezvous.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu_threads.h"

namespace jax_moe {
namespace {

using Clock = std::chrono::steady_clock;

// Failed rendezvous remembered per call site, so that a late device learns what happened instead of
// waiting for a call that is over. One that has been forgotten costs the late device a timeout.
constexpr size_t kMaxTombstones = 64;

struct Rendezvous {
  Rendezvous(std::shared_ptr<CallSite::Core> core, const Arrival& first)
      : site(std::move(core)),
        spec(first.spec),
        run_id(first.run_id),
        instance(first.instance),
        opened(Clock::now()),
        arrivals(first.spec.num_devices()) {}

  std::shared_ptr<CallSite::Core> site;
  CallSpec spec;
  int64_t run_id;
  int64_t instance;
  Clock::time_point opened;
  std::vector<std::optional<Arrival>> arrivals;  // by device
  int64_t num_arrived = 0;
  std::atomic<bool> over = false;  // full or abandoned: not to be watched any more
};

struct Group {
  std::chrono::duration<double> timeout;
  std::string description;
  bool is_closed = false;
};

// "0-2, 5" for the ranks of the devices for which `wanted` holds; "none" without any.
template <typename Wanted>
std::string ListRanks(const Rendezvous& meeting, Wanted wanted) {
  const int64_t virtual_ranks = meeting.spec.virtual_ranks;
  const auto num_devices = static_cast<int64_t>(meeting.arrivals.size());
  std::ostringstream out;
  for (int64_t device = 0; device < num_devices; ++device) {
    if (!wanted(device)) continue;
    const int64_t first = device * virtual_ranks;
    while (device + 1 < num_devices && wanted(device + 1)) ++device;
    const int64_t last = device * virtual_ranks + virtual_ranks - 1;
    out << (out.tellp() > 0 ? ", " : "") << first;
    if (last > first) out << "-" << last;
  }
  return out.tellp() > 0 ? out.str() : "none";
}

std::string ListArrived(const Rendezvous& meeting, bool arrived) {
  return ListRanks(meeting,
                   [&](int64_t device) { return meeting.arrivals[device].has_value() == arrived; });
}

}  // namespace

struct CallSite::Core : std::enable_shared_from_this<CallSite::Core> {
  struct Tombstone {
    int64_t run_id;
    int64_t instance;
    std::string reason;
  };
  struct Joined;

  Joined Join(Arrival& arrival);
  std::shared_ptr<Rendezvous> FindOpen(const Arrival& arrival) const;

  std::mutex mutex;
  std::vector<std::shared_ptr<Rendezvous>> open;  // a handful: the runs in flight
  std::deque<Tombstone> tombstones;
};

namespace {

// The process's one mutable global: the groups, the rendezvous that wait, and the threads.
class Runtime {
 public:
  // Never destroyed: its threads outlive every static destructor.
  static Runtime& Get() {
    static Runtime* runtime = new Runtime;
    return *runtime;
  }

  void Register(int64_t key, Group group) {
    std::lock_guard lock(mutex_);
    groups_.insert_or_assign(key, std::move(group));
    if (!watching_) std::thread([this] { WatchLoop(); }).detach();
    watching_ = true;
    wake_.notify_one();
  }

  void SetTimeout(int64_t key, std::chrono::duration<double> timeout) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    if (found != groups_.end()) found->second.timeout = timeout;
    wake_.notify_one();
  }

  void Close(int64_t key) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    if (found != groups_.end()) found->second.is_closed = true;
    wake_.notify_one();
  }

  bool IsOpen(int64_t key) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    return found != groups_.end() && !found->second.is_closed;
  }

  std::optional<Group> Find(int64_t key) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    return found == groups_.end() ? std::nullopt : std::optional<Group>(found->second);
  }

  void Watch(std::shared_ptr<Rendezvous> meeting) {
    std::lock_guard lock(mutex_);
    if (meeting->over) return;  // the others were faster than we
    const bool sooner = DeadlineOf(*meeting) < next_wake_;
    waiting_.push_back(std::move(meeting));
    if (sooner) wake_.notify_one();
  }

  void Unwatch(const std::shared_ptr<Rendezvous>& meeting) {
    meeting->over = true;
    std::lock_guard lock(mutex_);
    std::erase(waiting_, meeting);
  }

  int64_t num_waiting() {
    std::lock_guard lock(mutex_);
    return static_cast<int64_t>(waiting_.size());
  }

  ThreadCache& threads() { return threads_; }

 private:
  // A closed group's rendezvous are due at once.
  Clock::time_point DeadlineOf(const Rendezvous& meeting) const {
    const Group& group = groups_.at(meeting.spec.group_key);
    if (group.is_closed) return Clock::time_point::min();
    // Far enough for any timeout, and well within the clock's range.
    constexpr std::chrono::duration<double> kLongest = std::chrono::hours(24 * 365);
    return meeting.opened +
           std::chrono::duration_cast<Clock::duration>(std::min(group.timeout, kLongest));
  }

  [[noreturn]] void WatchLoop();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::unordered_map<int64_t, Group> groups_;
  std::vector<std::shared_ptr<Rendezvous>> waiting_;
  Clock::time_point next_wake_ = Clock::time_point::max();
  bool watching_ = false;
  ThreadCache threads_;
};

// Hands every device its status, each on a thread of its own: `done` goes on with that device's
// program, so that no device may wait behind another's.
void Complete(std::vector<std::optional<Arrival>> arrivals, const Status& status) {
  const auto shared_status = std::make_shared<const Status>(status);
  for (std::optional<Arrival>& arrival : arrivals) {
    if (!arrival.has_value()) continue;
    Runtime::Get().threads().Run(
        [done = std::move(arrival->done), shared_status] { done(*shared_status); });
  }
}

// Ends `meeting`, unless it is over already, with the reason that `describe` gives under the lock.
// The caller holds no lock.
template <typename Describe>
void Abandon(const std::shared_ptr<Rendezvous>& meeting, StatusCode code, Describe describe) {
  std::vector<std::optional<Arrival>> arrivals;
  std::string why;
  {
    std::lock_guard lock(meeting->site->mutex);
    if (std::erase(meeting->site->open, meeting) == 0) return;
    why = describe();
    auto& tombstones = meeting->site->tombstones;
    tombstones.push_back({meeting->run_id, meeting->instance, why});
    if (tombstones.size() > kMaxTombstones) tombstones.pop_front();
    arrivals = std::move(meeting->arrivals);
  }
  Runtime::Get().Unwatch(meeting);
  Complete(std::move(arrivals), {code, why});
}

std::string DescribeTimeout(const Rendezvous& meeting, const Group& group) {
  std::ostringstream why;
  why << OperationName(meeting.spec.kind) << ": no answer from ranks "
      << ListArrived(meeting, false) << " within " << group.timeout.count()
      << " s of the first arrival. " << group.description << ", instance " << meeting.instance
      << ": arrived ranks " << ListArrived(meeting, true) << ", MISSING ranks "
      << ListArrived(meeting, false)
      << ". Every device of the group must make the same calls: look for a jax.lax.cond or "
         "while_loop around this one that differs between ranks, for an error on a missing "
         "rank or a thread that died; if the ranks are only slow, give them longer with "
         "group.set_timeout(seconds).";
  return why.str();
}

std::string DescribeClosing(const Rendezvous& meeting, const Group& group) {
  return std::string(OperationName(meeting.spec.kind)) + ": " + group.description +
         " was closed while ranks " + ListArrived(meeting, true) + " waited for ranks " +
         ListArrived(meeting, false) +
         "; close a group only after its last call, or call group.rebuild().";
}

// Abandons `meeting`, which is past its deadline or whose group is closed.
void Expire(const std::shared_ptr<Rendezvous>& meeting) {
  const Group group = *Runtime::Get().Find(meeting->spec.group_key);
  if (group.is_closed) {
    Abandon(meeting, StatusCode::kFailedPrecondition,
            [&] { return DescribeClosing(*meeting, group); });
  } else {
    Abandon(meeting, StatusCode::kDeadlineExceeded, [&] {
      std::string why = DescribeTimeout(*meeting, group);
      // At once: the error itself never comes where ranks wait in one of XLA's collectives too.
      std::fputs((why + "\n").c_str(), stderr);
      std::fflush(stderr);
      return why;
    });
  }
}

void Runtime::WatchLoop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    next_wake_ = Clock::time_point::max();
    std::vector<std::shared_ptr<Rendezvous>> due;
    const Clock::time_point now = Clock::now();
    for (const auto& meeting : waiting_) {
      const Clock::time_point deadline = DeadlineOf(*meeting);
      if (deadline <= now) {
        due.push_back(meeting);
      } else {
        next_wake_ = std::min(next_wake_, deadline);
      }
    }
    if (due.empty()) {
      if (next_wake_ == Clock::time_point::max()) {
        wake_.wait(lock);
      } else {
        wake_.wait_until(lock, next_wake_);
      }
      continue;
    }
    for (const auto& meeting : due) std::erase(waiting_, meeting);
    lock.unlock();
    for (const auto& meeting : due) Expire(meeting);
    due.clear();
    lock.lock();
  }
}

// Sets off the work of a full rendezvous.
void Execute(const std::shared_ptr<Rendezvous>& meeting) {
  std::vector<DeviceBuffers> buffers;
  for (const std::optional<Arrival>& arrival : meeting->arrivals) {
    buffers.push_back(arrival->buffers);
  }
  std::shared_ptr<Operation> operation = MakeOperation(meeting->spec, std::move(buffers));
  RunOperation(Runtime::Get().threads(), operation, [meeting, operation] {
    const std::string& error = operation->error();
    Complete(std::move(meeting->arrivals),
             {error.empty() ? StatusCode::kOk : StatusCode::kInvalidArgument, error});
  });
}

std::string DescribeMismatch(const Rendezvous& meeting, const Arrival& arrival) {
  std::ostringstream out;
  out << OperationName(arrival.spec.kind) << ": the ranks of one call disagree. Ranks "
      << ListArrived(meeting, true) << " brought " << ToString(meeting.spec) << ", but device "
      << arrival.device << " of the group brought " << ToString(arrival.spec)
      << ". All devices must run the same program with the same shapes.";
  return out.str();
}

// Why the arrival cannot be taken at all; empty if it can.
Status CheckArrival(const Arrival& arrival) {
  const std::string wrong = Check(arrival.spec);
  if (!wrong.empty()) return {StatusCode::kInvalidArgument, wrong};
  std::ostringstream why;
  why << OperationName(arrival.spec.kind) << ": ";
  if (arrival.device < 0 || arrival.device >= arrival.spec.num_devices() || arrival.instance < 0) {
    why << "device " << arrival.device << " of group instance " << arrival.instance
        << " is not one of the group's " << arrival.spec.num_devices() << " devices.";
    return {StatusCode::kInvalidArgument, why.str()};
  }
  if (Runtime::Get().IsOpen(arrival.spec.group_key)) return {};
  const std::optional<Group> group = Runtime::Get().Find(arrival.spec.group_key);
  if (group.has_value()) {
    why << group->description << " is closed: call rebuild() on it before the call.";
  } else {
    why << "this process has not built the call's ExpertGroup, of " << arrival.spec.num_ranks
        << " ranks on " << arrival.spec.num_nodes << " nodes: build it before the call.";
  }
  return {StatusCode::kFailedPrecondition, why.str()};
}

}  // namespace

// What became of an arrival: a rendezvous that it joined, or an error.
struct CallSite::Core::Joined {
  std::shared_ptr<Rendezvous> meeting;
  bool is_new = false;
  bool is_full = false;
  Status error = {};  // with a meeting: it disagrees with that one; without: it came too late
};

// A device's n-th coming belongs to the n-th rendezvous of this run: the first open one that it has
// not joined, as those before are full and gone. So nothing is kept of past runs.
std::shared_ptr<Rendezvous> CallSite::Core::FindOpen(const Arrival& arrival) const {
  for (const auto& meeting : open) {
    if (meeting->run_id == arrival.run_id && meeting->instance == arrival.instance &&
        (meeting->spec != arrival.spec || !meeting->arrivals[arrival.device].has_value())) {
      return meeting;
    }
  }
  return nullptr;
}

// Leaves `arrival` untouched on error.
CallSite::Core::Joined CallSite::Core::Join(Arrival& arrival) {
  std::lock_guard lock(mutex);
  for (const Tombstone& grave : tombstones) {
    if (grave.run_id == arrival.run_id && grave.instance == arrival.instance) {
      return {
          .meeting = nullptr,
          .error = {StatusCode::kFailedPrecondition,
                    "device " + std::to_string(arrival.device) +
                        " of the group came too late, to a call that had failed: " + grave.reason}};
    }
  }
  std::shared_ptr<Rendezvous> meeting = FindOpen(arrival);
  const bool is_new = meeting == nullptr;
  if (is_new) {
    meeting = std::make_shared<Rendezvous>(shared_from_this(), arrival);
    open.push_back(meeting);
  } else if (meeting->spec != arrival.spec) {
    return {.meeting = meeting,
            .error = {StatusCode::kInvalidArgument, DescribeMismatch(*meeting, arrival)}};
  }
  const int64_t device = arrival.device;
  meeting->arrivals[device] = std::move(arrival);
  const bool is_full = ++meeting->num_arrived == static_cast<int64_t>(meeting->arrivals.size());
  if (is_full) std::erase(open, meeting);
  return {.meeting = meeting, .is_new = is_new, .is_full = is_full};
}

CallSite::CallSite() : core_(std::make_shared<Core>()) {}
CallSite::~CallSite() = default;

void CallSite::Join(Arrival arrival) {
  const Status wrong = CheckArrival(arrival);
  if (!wrong.ok()) return arrival.done(wrong);
  const Core::Joined joined = core_->Join(arrival);
  if (!joined.error.ok()) {
    if (joined.meeting != nullptr) {
      Abandon(joined.meeting, joined.error.code, [&] { return joined.error.message; });
    }
    arrival.done(joined.error);
  } else if (joined.is_full) {
    if (!joined.is_new) Runtime::Get().Unwatch(joined.meeting);
    Execute(joined.meeting);
  } else if (joined.is_new) {
    Runtime::Get().Watch(joined.meeting);
  }
}

void RegisterGroup(int64_t key, double timeout_s, std::string description) {
  Runtime::Get().Register(key, {std::chrono::duration<double>(timeout_s), std::move(description)});
}

void SetTimeout(int64_t key, double timeout_s) {
  Runtime::Get().SetTimeout(key, std::chrono::duration<double>(timeout_s));
}

void CloseGroup(int64_t key) { Runtime::Get().Close(key); }

int64_t NumWaiting() { return Runtime::Get().num_waiting(); }

}  // namespace jax_moe
