// gpu_harness KERNELS COMMAND...: runs the kernels (KERNELS/plan.cubin, dispatch.cubin,
// combine.cubin) against the specification, without XLA. Commands, in order:
//   devices=N            use the first N devices from here on (1)
//   check=V              every case at V virtual ranks a device
//   soak=V:STEPS         alternating shapes and routings, the epoch wrapping
//   deadline             absent and silent ranks, host abort, overlap
//   blocks=B link=L chunk=C   launch shape for `time` from here on (0 = the default)
//   time=V:TOKENS        plan, dispatch and combine at DeepSeek-V3 sizes against the device's own
//   copy
#include <cstdio>
#include <cstdlib>

#include "run.h"

namespace {

void Run(const std::string& command, const std::string& kernels,
         std::vector<harness::Device>& devices, harness::Tuning& tuning) {
  const size_t equals = command.find('='), colon = command.find(':');
  const std::string name = command.substr(0, equals);
  const uint32_t first = equals == std::string::npos
                             ? 0
                             : static_cast<uint32_t>(std::atoi(command.c_str() + equals + 1));
  const uint32_t second = colon == std::string::npos
                              ? 0
                              : static_cast<uint32_t>(std::atoi(command.c_str() + colon + 1));
  if (name == "devices") {
    devices = harness::OpenDevices(static_cast<int>(first), kernels);
  } else if (name == "check") {
    harness::RunCheck(devices, first);
  } else if (name == "soak") {
    harness::RunSoak(devices, first, second);
  } else if (name == "deadline") {
    harness::RunDeadline(devices);
  } else if (name == "blocks") {
    tuning.blocks_per_rank = first;
  } else if (name == "link") {
    tuning.link_blocks = first;
  } else if (name == "chunk") {
    tuning.chunk_tokens = first;
  } else if (name == "time") {
    harness::RunTime(devices, first, second, tuning);
  } else {
    harness::Fail(__FILE__, __LINE__, "unknown command " + command);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  HARNESS_REQUIRE(argc >= 3, "usage: gpu_harness KERNELS COMMAND...");
  harness::LoadDriver();
  harness::Tuning tuning{0, 0, 0};
  std::vector<harness::Device> devices = harness::OpenDevices(1, argv[1]);
  for (int i = 2; i < argc; i++) Run(argv[i], argv[1], devices, tuning);
  std::printf("all right\n");
  return 0;
}
