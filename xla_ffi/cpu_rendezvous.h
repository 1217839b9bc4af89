// Where the devices of a group meet. Nothing here waits: a device leaves its buffers and a
// completion, and the last one to come sets off the work for all. Free of FFI types.

#ifndef JAX_MOE_CPU_RENDEZVOUS_H_
#define JAX_MOE_CPU_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cpu_operations.h"
#include "status.h"

namespace jax_moe {

// Puts a group into the registry, changes its timeout there (waiting calls see it at once), or
// opens it again. Raises nothing; `timeout_s` is in seconds and > 0.
void RegisterGroup(int64_t key, double timeout_s, std::string description);
// Changes the timeout alone. Unknown keys are ignored.
void SetTimeout(int64_t key, double timeout_s);
// Calls of the group that wait, and those to come, fail. Unknown keys are ignored.
void CloseGroup(int64_t key);

// One device's coming to a call.
struct Arrival {
  int64_t run_id = 0;    // one execution of a program by all devices
  int64_t instance = 0;  // which of the mesh's groups
  int64_t device = 0;    // index in that group
  CallSpec spec;
  DeviceBuffers buffers;                    // must stay valid until `done`
  std::function<void(const Status&)> done;  // called once
};

// One call site of a compiled program. Its address is part of the rendezvous' key, so that two
// independent calls of one program cannot pair up wrongly.
class CallSite {
 public:
  CallSite();
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  // Never blocks. `done` runs on a thread of its own, except for an error that is already certain
  // now, where it runs before Join returns.
  void Join(Arrival arrival);

  struct Core;

 private:
  std::shared_ptr<Core> core_;  // shared with the watchdog
};

// Rendezvous that wait now, over all call sites (for tests).
int64_t NumWaiting();

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_RENDEZVOUS_H_
