#include "memory.h"

#include <chrono>
#include <random>
#include <thread>

namespace twin {

void Delay() {
  static std::atomic<uint32_t> threads{0};
  thread_local std::minstd_rand random(threads.fetch_add(1) * 2654435761u + 1);
  const uint32_t die = random() % 64;
  if (die == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
  if (die < 8) std::this_thread::yield();
}

void BulkStores::BULK_WAIT_READ() {
  Delay();
  for (const Store& store : pending_) {
    held_.push_back({store.to, std::vector<uint8_t>(store.stage, store.stage + store.bytes)});
  }
  pending_.clear();
}

void BulkStores::BULK_WAIT_WRITES() {
  BULK_WAIT_READ();
  for (const Held& held : held_) {
    Delay();
    std::memcpy(held.to, held.bytes.data(), held.bytes.size());
  }
  held_.clear();
}

}  // namespace twin
