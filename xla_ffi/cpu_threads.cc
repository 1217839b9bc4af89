#include "cpu_threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu_sums.h"

namespace jax_moe {

namespace {
constexpr std::chrono::seconds kIdleLifetime{20};
}  // namespace

struct ThreadCache::Worker {
  std::condition_variable wake;
  Task task;  // empty while idle
};

void ThreadCache::Run(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      Worker* worker = idle_.back();
      idle_.pop_back();
      worker->task = std::move(task);
      worker->wake.notify_one();  // under the lock, as the worker may end as soon as it can
      return;
    }
    ++num_threads_;
  }
  auto fresh = std::make_unique<Worker>();
  fresh->task = std::move(task);
  Worker* raw = fresh.get();
  try {
    std::thread([this, raw] {
      std::unique_ptr<Worker> owned(raw);
      Loop(*owned);
    }).detach();
    fresh.release();
  } catch (const std::system_error&) {
    // No thread to be had. Leave the task to the next one that turns idle; with none, run it here.
    std::unique_lock lock(mutex_);
    if (--num_threads_ > 0) {
      overflow_.push_back(std::move(fresh->task));
    } else {
      lock.unlock();
      fresh->task();
    }
  }
}

void ThreadCache::Loop(Worker& self) {
  // A completion goes on with XLA's program, and XLA flushes subnormals on all of its own threads:
  // the program's results must not depend on which thread it goes on.
  const FlushSubnormals flush;
  do {
    self.task();
  } while (AwaitTask(self));
}

// Returns false when the thread has been idle for so long that it should end.
bool ThreadCache::AwaitTask(Worker& self) {
  self.task = nullptr;  // frees what the task held before the thread rests
  std::unique_lock lock(mutex_);
  if (!overflow_.empty()) {
    self.task = std::move(overflow_.back());
    overflow_.pop_back();
    return true;
  }
  idle_.push_back(&self);
  if (self.wake.wait_for(lock, kIdleLifetime, [&] { return self.task != nullptr; })) return true;
  std::erase(idle_, &self);
  --num_threads_;
  return false;
}

namespace {

// The chunks of one operation, handed out by counters. A phase starts when the one before it has
// ended; no thread ever waits for another.
class Run : public std::enable_shared_from_this<Run> {
 public:
  Run(ThreadCache& threads, std::shared_ptr<Operation> operation, std::function<void()> finished)
      : threads_(threads),
        operation_(std::move(operation)),
        finished_(std::move(finished)),
        phases_(operation_->num_phases()) {}

  void Start(int phase) {
    for (; phase < static_cast<int>(phases_.size()); ++phase) {
      Phase& now = phases_[phase];
      now.num_chunks = operation_->num_chunks(phase);
      if (now.num_chunks == 0) continue;
      const int64_t num_threads =
          std::min<int64_t>(now.num_chunks, std::max(1u, std::thread::hardware_concurrency()));
      for (int64_t i = 1; i < num_threads; ++i) {
        threads_.Run([self = shared_from_this(), phase] {
          if (self->Work(phase)) self->Start(phase + 1);
        });
      }
      if (!Work(phase)) return;
    }
    finished_();
  }

 private:
  struct Phase {
    int64_t num_chunks = 0;
    std::atomic<int64_t> next = 0;
    std::atomic<int64_t> num_done = 0;
  };

  // Returns true on the one thread that ended the phase's last chunk.
  bool Work(int phase) {
    Phase& now = phases_[phase];
    for (;;) {
      const int64_t chunk = now.next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= now.num_chunks) return false;
      operation_->Run(phase, chunk);
      // Acquire and release: the last one sees, and hands on, what all chunks wrote.
      if (now.num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == now.num_chunks) return true;
    }
  }

  ThreadCache& threads_;
  std::shared_ptr<Operation> operation_;
  std::function<void()> finished_;
  std::vector<Phase> phases_;
};

}  // namespace

void RunOperation(ThreadCache& threads, std::shared_ptr<Operation> operation,
                  std::function<void()> finished) {
  std::make_shared<Run>(threads, std::move(operation), std::move(finished))->Start(0);
}

}  // namespace jax_moe
