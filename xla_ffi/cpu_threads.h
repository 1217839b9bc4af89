// Threads kept for reuse, and the running of an operation's chunks on them.

#ifndef JAX_MOE_CPU_THREADS_H_
#define JAX_MOE_CPU_THREADS_H_

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu_operations.h"

namespace jax_moe {

// Gives every task a thread of its own at once: an idle one, else a new one. A queue in front of a
// fixed number of threads would not do, because a task may be a whole device's program (the
// continuation of a completed promise) that itself waits for tasks behind it.
class ThreadCache {
 public:
  using Task = std::function<void()>;

  void Run(Task task);

 private:
  struct Worker;

  void Loop(Worker& self);
  bool AwaitTask(Worker& self);

  std::mutex mutex_;
  std::vector<Worker*> idle_;   // the last in is the first out: its cache is warm
  std::vector<Task> overflow_;  // only where the system refuses a new thread
  int num_threads_ = 0;
};

// Runs all chunks of all phases on this thread and on helpers from `threads`, and calls `finished`
// once, on whichever thread ran the last chunk. Returns without waiting for the helpers.
void RunOperation(ThreadCache& threads, std::shared_ptr<Operation> operation,
                  std::function<void()> finished);

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_THREADS_H_
