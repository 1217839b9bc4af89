#include "cuda_binding.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
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

using Table = std::vector<std::vector<int>>;  // [instance][device]

void Register(int64_t key, std::string description, uint32_t num_ranks, uint32_t virtual_ranks,
              Table instances, double join_s, double flight_s, Table processes, int process,
              std::vector<int> members, uint32_t processes_per_gpu) {
  const cuda::Timeouts timeouts = MakeTimeouts(join_s, flight_s);
  cuda::Topology topology{
      std::move(description), num_ranks, virtual_ranks,      std::move(instances),
      std::move(processes),   process,   std::move(members), processes_per_gpu};
  Raise(WithoutGil([&]() -> Status {
    JAX_MOE_RETURN_IF_ERROR(cuda::OpenDriver());
    return cuda::RegisterGroup(key, std::move(topology), timeouts);
  }));
}

// A meeting that Python holds: gather(phase, message) -> messages, which may raise.
class PythonMeeting : public cuda::Meeting {
 public:
  explicit PythonMeeting(nb::object gather) : gather_(std::move(gather)) {}

  Status Gather(const std::string& phase, const std::string& mine,
                std::vector<std::string>* all) override {
    const nb::gil_scoped_acquire acquire;
    all->clear();
    try {
      const nb::object got = gather_(phase, nb::bytes(mine.data(), mine.size()));
      for (const nb::handle message : got) {
        const auto bytes = nb::cast<nb::bytes>(message);
        all->emplace_back(bytes.c_str(), bytes.size());
      }
    } catch (nb::python_error& error) {
      const Status status{StatusCode::kDeadlineExceeded, nb::str(error.value()).c_str()};
      if (!error.matches(PyExc_Exception)) interrupt_.emplace(std::move(error));
      return status;
    }
    return {};
  }

  // Ctrl-C goes on as what it is.
  void RaiseInterrupt() {
    if (interrupt_) throw *std::exchange(interrupt_, std::nullopt);
  }

 private:
  nb::object gather_;
  std::optional<nb::python_error> interrupt_;
};

// Calls function(meeting) without the GIL; no meeting for None.
template <typename Function>
void RaiseFrom(nb::object gather, Function function) {
  if (gather.is_none()) return Raise(WithoutGil([&] { return function(nullptr); }));
  PythonMeeting meeting(std::move(gather));
  const Status status = WithoutGil([&] { return function(&meeting); });
  meeting.RaiseInterrupt();
  Raise(status);
}

Status Open(int ordinal, cuda::Device** device) {
  JAX_MOE_RETURN_IF_ERROR(cuda::OpenDriver());
  return cuda::Device::Get(ordinal, device);
}

// What other processes must know of a GPU. `reach` is {uuid: (peer access, NVLink)} of all others
// that this process sees.
nb::dict DescribeGpu(int ordinal) {
  cuda::Device* device = nullptr;
  std::string uuid;
  std::vector<cuda::Reach> others;
  std::vector<int> resident;
  Raise(WithoutGil([&]() -> Status {
    JAX_MOE_RETURN_IF_ERROR(Open(ordinal, &device));
    for (int operation = 1; operation <= ABI_NUM_OPERATIONS; ++operation) {
      JAX_MOE_RETURN_IF_ERROR(
          device->ResidentBlocks(operation, ABI_MAX_EXPERTS, &resident.emplace_back()));
    }
    JAX_MOE_RETURN_IF_ERROR(device->GetUuid(&uuid));
    return device->GetReach(&others);
  }));
  nb::dict gpu, reach;
  gpu["ordinal"] = ordinal;
  gpu["name"] = device->name();
  gpu["uuid"] = uuid;
  gpu["num_sms"] = device->num_sms();
  gpu["resident_blocks"] = resident;
  for (const cuda::Reach& other : others) {
    reach[other.uuid.c_str()] = nb::make_tuple(other.peer_access, other.nvlink);
  }
  gpu["reach"] = reach;
  return gpu;
}

nb::bytes ExportProbe(int ordinal) {
  cuda::IpcHandle handle;
  Raise(WithoutGil([&]() -> Status {
    cuda::Device* device = nullptr;
    JAX_MOE_RETURN_IF_ERROR(Open(ordinal, &device));
    return device->ExportProbe(&handle);
  }));
  return nb::bytes(handle.bytes, sizeof(handle.bytes));
}

// Opens and closes memory that another process has exported.
void TryProbe(int ordinal, nb::bytes exported) {
  cuda::IpcHandle handle;
  if (exported.size() != sizeof(handle.bytes)) throw nb::value_error("not a handle");
  std::memcpy(handle.bytes, exported.c_str(), sizeof(handle.bytes));
  Raise(WithoutGil([&]() -> Status {
    cuda::Device* device = nullptr;
    JAX_MOE_RETURN_IF_ERROR(Open(ordinal, &device));
    cuda::DevicePtr address = 0;
    JAX_MOE_RETURN_IF_ERROR(device->OpenMemory(handle, &address));
    return device->CloseMemory(address);
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
  cuda.def("register_group", &Register, nb::arg("key"), nb::arg("description"),
           nb::arg("num_ranks"), nb::arg("virtual_ranks"), nb::arg("instances"), nb::arg("join_s"),
           nb::arg("flight_s"), nb::arg("processes") = Table{}, nb::arg("process") = 0,
           nb::arg("members") = std::vector<int>{}, nb::arg("processes_per_gpu") = 1);
  cuda.def("describe_gpu", &DescribeGpu);
  cuda.def("export_probe", &ExportProbe);
  cuda.def("try_probe", &TryProbe);
  cuda.def("check_limits", &CheckCallLimits);
  cuda.def("check_call", &CheckCall);
  // All that waits for a group's lock does so without the GIL, which a meeting may need.
  cuda.def(
      "missing_bytes",
      [](int64_t key, uint32_t tokens, uint32_t top_k, uint32_t num_experts, uint32_t payload_bytes,
         int64_t lowering) {
        const auto group = Find(key);
        const auto sizes = MakeSizes(tokens, top_k, num_experts, payload_bytes);
        return WithoutGil([&] { return group->MissingBytes(sizes, lowering); });
      },
      nb::arg("key"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("num_experts"),
      nb::arg("payload_bytes"), nb::arg("lowering") = 0);
  cuda.def(
      "reserve",
      [](int64_t key, uint32_t tokens, uint32_t top_k, uint32_t num_experts, uint32_t payload_bytes,
         int64_t lowering, nb::object gather) {
        const auto group = Find(key);
        const auto sizes = MakeSizes(tokens, top_k, num_experts, payload_bytes);
        RaiseFrom(std::move(gather),
                  [&](cuda::Meeting* meeting) { return group->Reserve(sizes, lowering, meeting); });
      },
      nb::arg("key"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("num_experts"),
      nb::arg("payload_bytes"), nb::arg("lowering") = 0, nb::arg("gather") = nb::none());
  cuda.def("set_timeouts", [](int64_t key, double join_s, double flight_s) {
    const auto group = Find(key);
    const cuda::Timeouts timeouts = MakeTimeouts(join_s, flight_s);
    WithoutGil([&] { group->SetTimeouts(timeouts); });
  });
  cuda.def(
      "close_group",
      [](int64_t key, nb::object gather) {
        const auto group = Find(key);
        RaiseFrom(std::move(gather), [&](cuda::Meeting* meeting) { return group->Close(meeting); });
      },
      nb::arg("key"), nb::arg("gather") = nb::none());
  cuda.def(
      "rebuild_group",
      [](int64_t key, nb::object gather) {
        const auto group = Find(key);
        RaiseFrom(std::move(gather),
                  [&](cuda::Meeting* meeting) { return group->Rebuild(meeting); });
      },
      nb::arg("key"), nb::arg("gather") = nb::none());
  cuda.def("faults", [](int64_t key) {
    const auto group = Find(key);
    return WithoutGil([&] { return group->Faults(); });
  });
  cuda.def("waited_ns", [](int64_t key) {
    const auto group = Find(key);
    return WithoutGil([&] { return group->WaitedNs(); });
  });
  // Whether the GPU runs the embedded machine code rather than what its driver compiled.
  cuda.def("is_precompiled", [](int ordinal) {
    cuda::Device* device = nullptr;
    Raise(WithoutGil([&] { return Open(ordinal, &device); }));
    return device->precompiled();
  });
  cuda.def("num_launches", [](int64_t key) { return Find(key)->num_launches(); });
  cuda.def("stop_monitor", [] { WithoutGil([] { cuda::StopMonitor(); }); });
}

}  // namespace jax_moe
