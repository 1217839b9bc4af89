// The Python module: the table of FFI targets, the registration of groups, and the CUDA runtime's
// eager functions.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <type_traits>

#include "cpu_handlers.h"
#include "cpu_rendezvous.h"
#include "cuda_binding.h"
#include "cuda_handlers.h"

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

// `captured`: XLA may put the calls into CUDA graphs.
nb::dict CudaTargets(bool captured) {
  const auto stages = [](auto* execute) {
    nb::dict stages;
    stages["execute"] = HandlerCapsule(execute);
    return stages;
  };
  nb::dict cuda;
  cuda["jax_moe_plan"] = stages(captured ? jax_moe::CudaPlan : jax_moe::CudaPlanUncaptured);
  cuda["jax_moe_dispatch"] =
      stages(captured ? jax_moe::CudaDispatch : jax_moe::CudaDispatchUncaptured);
  cuda["jax_moe_combine"] =
      stages(captured ? jax_moe::CudaCombine : jax_moe::CudaCombineUncaptured);
  return cuda;
}

}  // namespace

NB_MODULE(_native, module) {
  // {platform: {target: {stage: capsule}}}
  module.def(
      "targets",
      [](bool cuda_captured) {
        nb::dict cpu;
        cpu["jax_moe_plan"] = Stages(jax_moe::CpuPlan);
        cpu["jax_moe_dispatch"] = Stages(jax_moe::CpuDispatch);
        cpu["jax_moe_combine"] = Stages(jax_moe::CpuCombine);
        nb::dict targets;
        targets["cpu"] = cpu;
        targets["CUDA"] = CudaTargets(cuda_captured);
        return targets;
      },
      nb::arg("cuda_captured") = true);
  module.def("register_group", &jax_moe::RegisterGroup, nb::arg("key"), nb::arg("timeout_s"),
             nb::arg("description"));
  module.def("set_timeout", &jax_moe::SetTimeout, nb::arg("key"), nb::arg("timeout_s"));
  module.def("close_group", &jax_moe::CloseGroup, nb::arg("key"));
  module.def("num_waiting", &jax_moe::NumWaiting);
  jax_moe::DefineCuda(module);
}
