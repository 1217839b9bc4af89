#include "cuda_binding.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "cuda_images.h"
#include "cuda_registry.h"

namespace jax_moe {

namespace nb = nanobind;

namespace {

PyObject* ExceptionType(StatusCode code) {
  switch (code) {
    case StatusCode::kInvalidArgument:
      return PyExc_ValueError;
    case StatusCode::kResourceExhausted:
      return PyExc_MemoryError;
    case StatusCode::kUnimplemented:
      return PyExc_NotImplementedError;
    default:
      return PyExc_RuntimeError;
  }
}

void Raise(const Status& status) {
  if (status.ok()) return;
  PyErr_SetString(ExceptionType(status.code), status.message.c_str());
  throw nb::python_error();
}

// The runtime may wait for a device, and other threads need Python meanwhile.
template <typename Function>
auto WithoutGil(Function function) {
  nb::gil_scoped_release release;
  return function();
}

std::shared_ptr<cuda::Group> Find(int64_t key) {
  auto group = cuda::FindGroup(key);
  if (group == nullptr) Raise({StatusCode::kFailedPrecondition, "this process has no such group"});
  return group;
}

cuda::Timeouts MakeTimeouts(double join_s, double flight_s) {
  if (!(join_s > 0 && flight_s > 0 && join_s < 1e9 && flight_s < 1e9)) {
    Raise({StatusCode::kInvalidArgument, "timeouts must be > 0 and < 1e9 seconds"});
  }
  return {static_cast<uint64_t>(std::llround(join_s * 1e9)),
          static_cast<uint64_t>(std::llround(flight_s * 1e9))};
}

cuda::PoolSizes MakeSizes(uint32_t tokens, uint32_t top_k, uint32_t num_experts,
                          uint32_t payload_bytes) {
  return {tokens, top_k, num_experts, payload_bytes};
}

void Register(int64_t key, std::string description, uint32_t num_ranks, uint32_t virtual_ranks,
              std::vector<std::vector<int>> instances, double join_s, double flight_s) {
  const cuda::Timeouts timeouts = MakeTimeouts(join_s, flight_s);
  Raise(WithoutGil([&]() -> Status {
    JAX_MOE_RETURN_IF_ERROR(cuda::OpenDriver());
    return cuda::RegisterGroup(
        key, {std::move(description), num_ranks, virtual_ranks, std::move(instances)}, timeouts);
  }));
}

cuda::Call MakeCall(uint32_t num_ranks, int operation, uint32_t num_nodes, uint32_t tokens,
                    uint32_t top_k, uint32_t num_experts, uint32_t capacity, uint32_t alignment,
                    uint32_t payload_bytes) {
  cuda::Call call;
  call.operation = operation;
  call.shape.num_ranks = num_ranks;
  call.shape.num_nodes = num_nodes;
  call.shape.num_tokens = tokens;
  call.shape.topk = top_k;
  call.shape.num_experts = num_experts;
  call.shape.capacity = capacity;
  call.shape.alignment = alignment;
  call.shape.payload_bytes = payload_bytes;
  return call;
}

// Needs no GPU.
void CheckCallLimits(uint32_t num_ranks, int operation, uint32_t num_nodes, uint32_t tokens,
                     uint32_t top_k, uint32_t num_experts, uint32_t capacity, uint32_t alignment,
                     uint32_t payload_bytes) {
  Raise(cuda::CheckLimits(MakeCall(num_ranks, operation, num_nodes, tokens, top_k, num_experts,
                                   capacity, alignment, payload_bytes)));
}

// The limits, and whether the launch fits the group's devices.
void CheckCall(int64_t key, int operation, uint32_t num_nodes, uint32_t tokens, uint32_t top_k,
               uint32_t num_experts, uint32_t capacity, uint32_t alignment, uint32_t payload_bytes,
               int64_t num_sms) {
  const auto group = Find(key);
  cuda::Call call = MakeCall(group->topology().num_ranks, operation, num_nodes, tokens, top_k,
                             num_experts, capacity, alignment, payload_bytes);
  call.num_sms = num_sms;
  call.shape.virtual_ranks = group->topology().virtual_ranks;
  Raise(WithoutGil([&] { return group->CheckCall(call); }));
}

nb::dict Images() {
  nb::dict images;
  for (const cuda::KernelImage& image : cuda::kKernelImages) {
    images[image.entry] = nb::make_tuple(
        nb::str(image.ptx), image.cubin == nullptr
                                ? nb::object(nb::none())
                                : nb::object(nb::bytes(image.cubin, image.cubin_bytes)));
  }
  return images;
}

nb::dict Limits() {
  nb::dict limits;
  limits["ranks"] = ABI_MAX_RANKS;
  limits["top_k"] = ABI_MAX_TOPK;
  limits["experts"] = ABI_MAX_EXPERTS;
  limits["payload_bytes"] = ABI_MAX_PAYLOAD_BYTES;
  return limits;
}

}  // namespace

void DefineCuda(nb::module_& module) {
  nb::module_ cuda = module.def_submodule("cuda");
  cuda.def(
      "open_driver", [](const std::string& path) { Raise(cuda::OpenDriver(path)); },
      nb::arg("path") = "");
  cuda.def("images", &Images);
  cuda.def("limits", &Limits);
  cuda.def("pool_bytes", [](uint32_t num_ranks, uint32_t tokens, uint32_t top_k,
                            uint32_t num_experts, uint32_t payload_bytes) {
    return cuda::LayoutOf(num_ranks, MakeSizes(tokens, top_k, num_experts, payload_bytes)).size;
  });
  cuda.def("register_group", &Register);
  cuda.def("check_limits", &CheckCallLimits);
  cuda.def("check_call", &CheckCall);
  cuda.def("missing_bytes", [](int64_t key, uint32_t tokens, uint32_t top_k, uint32_t num_experts,
                               uint32_t payload_bytes) {
    return Find(key)->MissingBytes(MakeSizes(tokens, top_k, num_experts, payload_bytes));
  });
  cuda.def("reserve", [](int64_t key, uint32_t tokens, uint32_t top_k, uint32_t num_experts,
                         uint32_t payload_bytes) {
    const auto group = Find(key);
    Raise(WithoutGil(
        [&] { return group->Reserve(MakeSizes(tokens, top_k, num_experts, payload_bytes)); }));
  });
  cuda.def("set_timeouts", [](int64_t key, double join_s, double flight_s) {
    Find(key)->SetTimeouts(MakeTimeouts(join_s, flight_s));
  });
  cuda.def("close_group", [](int64_t key) {
    const auto group = Find(key);
    Raise(WithoutGil([&] { return group->Close(); }));
  });
  cuda.def("rebuild_group", [](int64_t key) {
    const auto group = Find(key);
    Raise(WithoutGil([&] { return group->Rebuild(); }));
  });
  cuda.def("faults", [](int64_t key) { return Find(key)->Faults(); });
  cuda.def("waited_ns", [](int64_t key) { return Find(key)->WaitedNs(); });
  // Whether the GPU runs the embedded machine code rather than what its driver compiled.
  cuda.def("is_precompiled", [](int ordinal) {
    cuda::Device* device = nullptr;
    Raise(WithoutGil([&]() -> Status {
      JAX_MOE_RETURN_IF_ERROR(cuda::OpenDriver());
      return cuda::Device::Get(ordinal, &device);
    }));
    return device->precompiled();
  });
  cuda.def("num_launches", [](int64_t key) { return Find(key)->num_launches(); });
  cuda.def("stop_monitor", [] { WithoutGil([] { cuda::StopMonitor(); }); });
}

}  // namespace jax_moe
