#include <algorithm>
#include <cstdio>
#include <random>

#include "run.h"

namespace harness {

void RunSoak(const std::vector<Device>& devices, uint32_t virtual_ranks, uint32_t steps) {
  const uint32_t ranks = virtual_ranks * static_cast<uint32_t>(devices.size());
  const uint32_t nodes = ranks % 2 == 0 ? 2 : 1;
  std::vector<Case> cases;
  const Routing routings[] = {Routing::kUniform, Routing::kSkewed, Routing::kInvalid,
                              Routing::kHalfEmpty};
  for (uint32_t i = 0; i < 8; i++) {
    Sizes sizes{ranks,
                i % 3 == 0 ? nodes : 1,
                1 + 9 * i,
                1 + i % 6,
                ranks * (1 + i % 3),
                0,
                i % 4 + 1,
                8 + 64 * i,
                i % 2 == 0,
                i % 3 == 1};
    sizes.capacity = WorstCapacity(sizes);
    cases.push_back({"soak " + std::to_string(i), sizes, routings[i % 4]});
  }
  const auto layout = jax_moe::ptx::PoolLayout::Make(ranks, 64, 6, 3 * ranks, 2048, 4096);
  Group group(devices, ranks, virtual_ranks, layout);
  // The epoch passes 2^64 in the middle of the run, and 2^32 in none: flags are 64 bits wide.
  group.Reset(0 - static_cast<uint64_t>(steps) * ABI_NUM_OPERATIONS / 2);
  std::vector<Expected> expected;
  std::vector<std::vector<Arrays>> arrays(cases.size());
  for (size_t i = 0; i < cases.size(); i++) {
    expected.push_back(Expect(cases[i], 7 + i));
    for (size_t d = 0; d < devices.size(); d++) {
      arrays[i].push_back(group.MakeArrays(d, cases[i].sizes));
      UploadOperands(group, d, cases[i], expected[i], arrays[i][d]);
    }
  }
  std::mt19937 random(5);
  for (uint32_t step = 0; step < steps; step++) {
    // Two cases in flight before a look, so that a call follows another of a different shape at
    // once.
    const size_t first = random() % cases.size();
    const size_t second = (first + 1 + random() % (cases.size() - 1)) % cases.size();
    auto draw = [&](uint32_t below) { return static_cast<uint32_t>(random() % below); };
    const Tuning tuning{draw(4) * 3, draw(2), draw(9)};
    LaunchAll(group, cases[first].sizes, arrays[first], tuning);
    LaunchAll(group, cases[second].sizes, arrays[second], tuning);
    CheckOutputs(group, cases[first], expected[first], arrays[first]);
    CheckOutputs(group, cases[second], expected[second], arrays[second]);
  }
  group.CheckGuards("soak");
  std::printf("soak: %u steps of 6 calls right at %u ranks on %zu devices, the epoch wrapping\n",
              steps, ranks, devices.size());
}

}  // namespace harness
