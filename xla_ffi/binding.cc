// The table of FFI targets. Nothing else of the library is visible to Python.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <type_traits>

#include "cpu_handlers.h"
#include "cpu_rendezvous.h"

namespace nb = nanobind;

namespace {

template <typename Handler>
nb::capsule HandlerCapsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>,
                "a capsule must hold an FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

template <typename Handler>
nb::dict Stages(Handler* execute) {
  nb::dict stages;
  stages["instantiate"] = HandlerCapsule(jax_moe::CpuInstantiate);
  stages["execute"] = HandlerCapsule(execute);
  return stages;
}

}  // namespace

NB_MODULE(_native, module) {
  // {platform: {target: {stage: capsule}}}
  module.def("targets", [] {
    nb::dict cpu;
    cpu["jax_moe_plan"] = Stages(jax_moe::CpuPlan);
    cpu["jax_moe_dispatch"] = Stages(jax_moe::CpuDispatch);
    cpu["jax_moe_combine"] = Stages(jax_moe::CpuCombine);
    nb::dict targets;
    targets["cpu"] = cpu;
    return targets;
  });
  module.def("register_group", &jax_moe::RegisterGroup, nb::arg("key"), nb::arg("timeout_s"),
             nb::arg("description"));
  module.def("unregister_group", &jax_moe::UnregisterGroup, nb::arg("key"));
  module.def("num_waiting", &jax_moe::NumWaiting);
}
