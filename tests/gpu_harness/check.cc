#include <algorithm>
#include <cstdio>

#include "run.h"

namespace harness {
namespace {

// Device `index`'s block of an array stacked over ranks.
template <typename T>
std::vector<T> BlockOf(const Group& group, const std::vector<T>& stacked, size_t index,
                       uint32_t ranks) {
  const size_t count = stacked.size() / ranks * group.virtual_ranks();
  return {stacked.begin() + index * count, stacked.begin() + (index + 1) * count};
}

std::vector<int32_t> Ints(const Output& output) {
  return Download<int32_t>(output.ptr(), output.bytes() / 4);
}

void CheckPlan(const Group& group, const Case& test, const PlanArrays& want, size_t index,
               const Arrays& got) {
  auto compare = [&](const char* what, const Output& output, const std::vector<int32_t>& stacked) {
    CompareInts(test, what, Ints(output), BlockOf(group, stacked, index, test.sizes.ranks));
  };
  compare("expert_ids", got.expert_ids, want.expert_ids);
  compare("positions", got.positions, want.positions);
  compare("sources", got.sources, want.sources);
  compare("arrivals", got.arrivals, want.arrivals);
  compare("group_sizes", got.group_sizes, want.group_sizes);
  compare("padded_group_sizes", got.padded_group_sizes, want.padded_group_sizes);
  compare("dropped", got.dropped, want.dropped);
  compare("invalid", got.invalid, want.invalid);
}

}  // namespace

void UploadOperands(const Group& group, size_t index, const Case& test, const Expected& expected,
                    const Arrays& arrays) {
  HARNESS_CHECK(driver.cuCtxSetCurrent(group.devices()[index].context));
  const uint32_t ranks = test.sizes.ranks;
  auto upload = [&](const DeviceBuffer& to, const auto& stacked) {
    const auto block = BlockOf(group, stacked, index, ranks);
    Upload(to.ptr(), block.data(), block.size());
  };
  upload(arrays.ids_in, expected.ids_in);
  upload(arrays.x, expected.x);
  upload(arrays.s_in, expected.s);
  upload(arrays.rows_in, expected.rows_in);
  upload(arrays.row_s_in, expected.row_s_in);
}

void LaunchAll(const Group& group, const Sizes& sizes, const std::vector<Arrays>& arrays,
               const Tuning& tuning) {
  for (size_t i = 0; i < arrays.size(); i++) {
    HARNESS_CHECK(driver.cuCtxSetCurrent(group.devices()[i].context));
    for (const Output* output : arrays[i].outputs()) output->Poison(group.devices()[i].stream);
    for (int operation = 1; operation <= ABI_NUM_OPERATIONS; operation++) {
      group.Launch(i, operation, sizes, arrays[i], tuning);
    }
  }
}

void CheckOutputs(const Group& group, const Case& test, const Expected& expected,
                  const std::vector<Arrays>& arrays) {
  const uint32_t ranks = test.sizes.ranks;
  for (size_t i = 0; i < arrays.size(); i++) {
    HARNESS_CHECK(driver.cuCtxSetCurrent(group.devices()[i].context));
    HARNESS_CHECK(driver.cuStreamSynchronize(group.devices()[i].stream));
  }
  for (size_t i = 0; i < arrays.size(); i++) {
    HARNESS_CHECK(driver.cuCtxSetCurrent(group.devices()[i].context));
    const Arrays& got = arrays[i];
    CheckPlan(group, test, expected.plan, i, got);
    auto bytes = [](const Output& output) {
      return Download<uint8_t>(output.ptr(), output.bytes());
    };
    auto floats = [](const Output& output) {
      return Download<float>(output.ptr(), output.bytes() / 4);
    };
    CompareRows(test, "rows", bytes(got.rows), BlockOf(group, expected.rows, i, ranks), false);
    CompareFloats(test, "row_s", floats(got.row_s), BlockOf(group, expected.row_s, i, ranks));
    CompareRows(test, "y", bytes(got.y), BlockOf(group, expected.y, i, ranks), true);
    CompareFloats(test, "s", floats(got.s), BlockOf(group, expected.s_out, i, ranks));
    for (const Output* output : got.outputs()) output->CheckGuards(test.name + ": output");
  }
}

void RunCheck(const std::vector<Device>& devices, uint32_t virtual_ranks) {
  const uint32_t ranks = virtual_ranks * static_cast<uint32_t>(devices.size());
  const Tuning tunings[] = {{0, 0, 0}, {1, 1, 3}, {2, 1, 8}, {5, 2, 1}};
  uint64_t seed = 1000 * ranks;
  size_t count = 0;
  for (const Case& test : CheckCases(ranks)) {
    const Sizes& sizes = test.sizes;
    const auto layout = jax_moe::ptx::PoolLayout::Make(ranks, sizes.tokens, sizes.topk,
                                                       sizes.experts, sizes.payload_bytes(), 4096);
    Group group(devices, ranks, virtual_ranks, layout);
    const Expected expected = Expect(test, seed++);
    std::vector<Arrays> arrays;
    for (size_t i = 0; i < devices.size(); i++) {
      arrays.push_back(group.MakeArrays(i, sizes));
      UploadOperands(group, i, test, expected, arrays[i]);
    }
    for (const Tuning& tuning : tunings) {
      LaunchAll(group, sizes, arrays, tuning);
      CheckOutputs(group, test, expected, arrays);
      group.CheckGuards(test.name);
      count++;
    }
  }
  std::printf("check: %zu calls of each operation right at %u ranks on %zu devices\n", count, ranks,
              devices.size());
}

}  // namespace harness
