// Prints struct Params as the compiler sees it (offset, bytes, name), and tries the pool layout.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "../../ptx/params.h"

namespace {

using jax_moe::ptx::PoolLayout;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::printf("not so: %s\n", what);
  std::exit(1);
}

// Regions follow each other without overlap, halves included, and the last one ends at the size.
void TryLayout(uint32_t ranks, uint32_t tokens, uint32_t topk, uint32_t experts, uint32_t payload,
               uint64_t guard) {
  const PoolLayout l = PoolLayout::Make(ranks, tokens, topk, experts, payload, guard);
  const uint64_t begins[] = {l.chunk_flags, l.ids, l.counts, l.gates, l.slots};
  const uint64_t bytes[] = {l.room.chunk_flags, l.room.ids, l.room.counts, l.room.gates,
                            l.room.slots};
  const uint64_t strides[] = {0, l.ids_stride, l.counts_stride, l.gates_stride, l.slots_stride};
  uint64_t end = ABI_POOL_HEAD_BYTES;
  for (int i = 0; i < 5; i++) {
    Require(begins[i] == end + guard, "a region begins a guard band after the last");
    Require(begins[i] % ABI_POOL_ALIGN == 0, "a region is aligned");
    Require(strides[i] == 0 || strides[i] >= bytes[i] + guard, "halves do not overlap");
    const uint64_t last = begins[i] + strides[i] + bytes[i];
    end = jax_moe::ptx::AlignUp(last, ABI_POOL_ALIGN);
  }
  Require(end + guard == l.size, "the last region's end and a guard band are the size");
  jax_moe::ptx::CallShape call{ranks, 1, 0, 1, tokens, topk, experts, 0, 1, payload, false, true};
  Require(l.Fits(call), "the sizes a pool was made for fit it");
  call.num_tokens += 1 + ABI_POOL_ALIGN;
  Require(!l.Fits(call), "more tokens do not");
}

void TryChunks() {
  for (uint32_t ranks : {1, 8, 64}) {
    for (uint32_t tokens : {0, 1, 100, 4096, 100000}) {
      for (uint32_t blocks : {1, 16, 132}) {
        const uint32_t chunk = jax_moe::ptx::DefaultChunkTokens(ABI_OPERATION_DISPATCH, ranks,
                                                                tokens, blocks, 1 + blocks / 4);
        Require(chunk >= 1 && chunk <= ABI_MAX_CHUNK_TOKENS, "chunk_tokens is in range");
      }
    }
  }
  Require(jax_moe::ptx::NumSegments(ABI_MAX_RANKS) * ABI_MAX_RANKS <= ABI_PLAN_MAX_SEGMENTS,
          "segments of all ranks fit the flags");
}

}  // namespace

#define FIELD(name)                                                 \
  std::printf("%zu %zu %s\n", offsetof(jax_moe::ptx::Params, name), \
              sizeof(jax_moe::ptx::Params::name), #name)

int main() {
  TryLayout(1, 0, 1, 1, 16, 0);
  TryLayout(1, 1, 1, 1, 16, 4096);
  TryLayout(3, 67, 7, 9, 2064, 128);
  TryLayout(64, 4096, 16, 2048, 65536, 0);
  TryChunks();
  FIELD(pools), FIELD(report), FIELD(num_ranks), FIELD(virtual_ranks), FIELD(first_rank);
  FIELD(num_nodes), FIELD(num_tokens), FIELD(topk), FIELD(num_experts), FIELD(capacity);
  FIELD(alignment), FIELD(flags), FIELD(payload_bytes), FIELD(slot_bytes), FIELD(chunk_tokens);
  FIELD(num_chunks), FIELD(blocks_per_rank), FIELD(link_blocks), FIELD(num_segments);
  FIELD(segment_ids), FIELD(chunk_flags), FIELD(ids), FIELD(counts), FIELD(gates), FIELD(slots);
  FIELD(ids_stride), FIELD(counts_stride), FIELD(gates_stride), FIELD(slots_stride);
  FIELD(arrays);
  return 0;
}
