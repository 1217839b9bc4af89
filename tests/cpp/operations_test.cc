#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "check.h"
#include "cpu_copies.h"
#include "cpu_operations.h"
#include "cpu_sums.h"
#include "cpu_threads.h"
#include "tests.h"
#include "world.h"

namespace jax_moe {
namespace {

CallSpec Shape(int64_t ranks, int64_t virtual_ranks, int64_t nodes, int64_t experts_per_rank,
               int64_t tokens, int64_t top_k, int64_t hidden, int64_t capacity,
               int64_t alignment = 1, int64_t zero_tail = 1) {
  CallSpec spec;
  spec.num_ranks = ranks;
  spec.virtual_ranks = virtual_ranks;
  spec.num_nodes = nodes;
  spec.num_experts = ranks * experts_per_rank;
  spec.tokens = tokens;
  spec.top_k = top_k;
  spec.hidden = hidden;
  spec.capacity = capacity;
  spec.alignment = alignment;
  spec.zero_tail = zero_tail;
  return spec;
}

// Runs all chunks on this thread, each phase's in random order.
void RunAlone(Operation& operation, std::mt19937& random) {
  for (int phase = 0; phase < operation.num_phases(); ++phase) {
    std::vector<int64_t> chunks(operation.num_chunks(phase));
    std::iota(chunks.begin(), chunks.end(), 0);
    std::shuffle(chunks.begin(), chunks.end(), random);
    for (int64_t chunk : chunks) operation.Run(phase, chunk);
  }
}

void RunWithThreads(ThreadCache& threads, std::shared_ptr<Operation> operation) {
  std::atomic<bool> finished = false;
  RunOperation(threads, std::move(operation), [&] {
    finished = true;
    finished.notify_one();
  });
  finished.wait(false);
}

void CheckAllKinds(CallSpec spec, Routing routing, ThreadCache& threads, std::mt19937& random) {
  World world(spec, routing, static_cast<uint32_t>(random()));
  for (OperationKind kind : kKinds) {
    CHECK_THAT(Check(world.Spec(kind)).empty(), Check(world.Spec(kind)));
    world.Poison(kind);
    std::shared_ptr<Operation> alone = MakeOperation(world.Spec(kind), world.AllBuffers(kind));
    RunAlone(*alone, random);
    CHECK_THAT(alone->error().empty(), alone->error());
    world.CheckResults(kind, "alone");
    world.Poison(kind);
    RunWithThreads(threads, MakeOperation(world.Spec(kind), world.AllBuffers(kind)));
    world.CheckResults(kind, "with threads");
  }
}

}  // namespace

void TestOperations() {
  // The worst case, less than it, alignment, an undefined tail, no tokens, no rows, blocks of the
  // hidden size that end in odd places.
  const CallSpec shapes[] = {
      Shape(1, 1, 1, 1, 1, 1, 1, 1),          Shape(1, 1, 1, 4, 7, 3, 5, 21),
      Shape(2, 1, 1, 3, 5, 2, 8, 20),         Shape(3, 1, 3, 2, 4, 4, 17, 9, 2),
      Shape(4, 2, 2, 2, 6, 3, 33, 40, 4),     Shape(6, 3, 2, 1, 5, 6, 64, 30, 1, 0),
      Shape(8, 1, 2, 2, 2, 5, 1100, 10, 8),   Shape(8, 8, 4, 1, 2, 8, 513, 24, 1, 0),
      Shape(5, 1, 1, 2, 0, 2, 4, 8),          Shape(4, 1, 2, 2, 3, 2, 6, 0),
      Shape(4, 4, 1, 8, 6, 8, 70, 100, 3, 0),
  };
  ThreadCache& threads = *new ThreadCache;  // its threads may outlive this function
  std::mt19937 random(1);
  for (CallSpec spec : shapes) {
    for (PayloadType payload : {PayloadType::kFloat32, PayloadType::kBFloat16}) {
      spec.payload = payload;
      for (Routing routing :
           {Routing::kRandom, Routing::kOneExpert, Routing::kNone, Routing::kOutOfRange}) {
        CheckAllKinds(spec, routing, threads, random);
      }
    }
  }
  // The sums leave this thread's own arithmetic as it was; XLA's programs that go on with the
  // cache's threads have subnormals flushed there, as on XLA's own.
  static volatile float tiny = 1e-40f;
  CHECK_THAT(tiny * 1.0f != 0.0f, "subnormals are flushed after a combine on this thread");
  std::atomic<int> flushed = -1;
  threads.Run([&] {
    flushed = tiny * 1.0f == 0.0f;
    flushed.notify_one();
  });
  flushed.wait(-1);
  CHECK_THAT(flushed == 1, "subnormals are not flushed on the cache's threads");
}

// Each chunk adds up what all chunks of the phase before wrote; one phase has nothing to do.
class Relay final : public Operation {
 public:
  int num_phases() const override { return 4; }
  int64_t num_chunks(int phase) const override { return phase == 1 ? 0 : kNumChunks; }
  void Run(int phase, int64_t chunk) override {
    std::this_thread::sleep_for(std::chrono::microseconds(20));  // lets the helpers have some
    const std::vector<int64_t>& before = values[phase == 3 ? 2 : 0];
    values[phase][chunk] = phase == 0 ? 1 : std::accumulate(before.begin(), before.end(), 0);
  }

  static constexpr int64_t kNumChunks = 8;
  std::vector<std::vector<int64_t>> values{4, std::vector<int64_t>(kNumChunks)};
};

void TestPhases() {
  ThreadCache& threads = *new ThreadCache;
  for (int round = 0; round < 300; ++round) {
    const auto relay = std::make_shared<Relay>();
    RunWithThreads(threads, relay);
    for (int64_t value : relay->values[3]) CHECK_THAT(value == 64, value);
  }
}

void TestCopies() {
  // Lengths around whole lines, sources and targets on and off their alignment.
  std::vector<char> from(1024), to(1024);
  std::iota(from.begin(), from.end(), 1);
  for (int64_t length : {0, 1, 15, 63, 64, 65, 200, 640}) {
    for (int64_t from_at : {0, 1, 16}) {
      for (int64_t to_at : {0, 2, 16, 32}) {
        std::fill(to.begin(), to.end(), 0);
        CopyStreaming(&to[to_at], &from[from_at], length);
        FinishStreaming();
        for (int64_t i = 0; i < 1024; ++i) {
          const bool inside = i >= to_at && i < to_at + length;
          const char want = inside ? from[from_at + i - to_at] : 0;
          CHECK_THAT(to[i] == want, length << " bytes, " << from_at << " to " << to_at);
        }
      }
    }
  }
}

void TestWrongInput() {
  CallSpec spec = Shape(2, 1, 1, 2, 3, 2, 4, 6);
  spec.payload = PayloadType::kFloat32;
  std::vector<float> x(12), s(6), rows(24), row_s(6), y(12);
  std::vector<int32_t> sources(6, 12), sizes(2, 3), ids(6, 1), positions(6, 6);
  std::mt19937 random(1);

  spec.kind = OperationKind::kDispatch;
  DeviceBuffers buffers{{x.data(), s.data(), sources.data(), sizes.data()},
                        {rows.data(), row_s.data()}};
  auto operation = MakeOperation(spec, {buffers, buffers});
  RunAlone(*operation, random);
  CHECK_CONTAINS(operation->error(), "is 12, not below ranks * tokens * top_k");

  sizes = {4, 4};
  operation = MakeOperation(spec, {buffers, buffers});
  CHECK_CONTAINS(operation->error(), "add up to 8, past the capacity");

  spec.kind = OperationKind::kCombine;
  buffers = {{rows.data(), row_s.data(), ids.data(), positions.data()}, {y.data(), s.data()}};
  operation = MakeOperation(spec, {buffers, buffers});
  RunAlone(*operation, random);
  CHECK_CONTAINS(operation->error(), "has expert id 1 and position 6, out of range");

  spec.num_nodes = 3;
  CHECK_CONTAINS(Check(spec), "nodes must divide ranks");
  spec = Shape(4, 1, 1, 1, int64_t{1} << 27, 4, 1, 1);
  CHECK_CONTAINS(Check(spec), "below 2^31");
}

}  // namespace jax_moe
