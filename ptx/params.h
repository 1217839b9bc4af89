// C++ view of the kernels' contract: the parameter struct, the pool's layout and the choice of
// launch shape.
//
// Pure functions of the sizes: no CUDA, no FFI type, nothing that can fail. The runtime, the GPU
// harness and the protocol twin include it; ptx/abi.h holds the numbers.
#ifndef JAX_MOE_PTX_PARAMS_H_
#define JAX_MOE_PTX_PARAMS_H_

#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace jax_moe::ptx {

constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
constexpr uint64_t CeilDiv(uint64_t value, uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// The shape of one call, as the handler reads it off its buffers and attributes and the group.
struct CallShape {
  uint32_t num_ranks;
  uint32_t virtual_ranks;
  uint32_t first_rank;  // device's index in the group * virtual_ranks
  uint32_t num_nodes;
  uint32_t num_tokens;  // per rank
  uint32_t topk;
  uint32_t num_experts;
  uint32_t capacity;       // rows per rank
  uint32_t alignment;      // rows
  uint32_t payload_bytes;  // of one token: hidden * item size; 0 for plan
  bool zero_tail;
  bool bf16;  // else float32
};

// The one kernel parameter. Offsets are ABI_PARAMS_*; arrays[] is indexed through ArraySlot().
struct Params {
  uint64_t pools;  // device pointer to uint64_t[num_ranks]: each rank's pool as this device sees it
  uint64_t report;  // device pointer to the report (host memory)
  uint32_t num_ranks;
  uint32_t virtual_ranks;
  uint32_t first_rank;
  uint32_t num_nodes;
  uint32_t num_tokens;
  uint32_t topk;
  uint32_t num_experts;
  uint32_t capacity;
  uint32_t alignment;
  uint32_t flags;  // ABI_FLAG_*
  uint32_t payload_bytes;
  uint32_t slot_bytes;
  uint32_t chunk_tokens;
  uint32_t num_chunks;  // per source rank, at least 1
  uint32_t blocks_per_rank;
  uint32_t
      link_blocks;  // 1..blocks_per_rank: these blocks send with all warps before they receive; if
                    // it is blocks_per_rank, every block sends with some of its warps
  uint32_t num_segments;  // per source rank
  uint32_t segment_ids;
  uint64_t chunk_flags;  // byte offsets in a pool
  uint64_t ids;
  uint64_t counts;
  uint64_t gates;
  uint64_t slots;
  uint64_t ids_stride;  // bytes from a region's even half to its odd half
  uint64_t counts_stride;
  uint64_t gates_stride;
  uint64_t slots_stride;
  uint64_t arrays[12];  // device pointers of the call's operands and results
};

static_assert(sizeof(Params) == ABI_PARAMS_BYTES);
static_assert(offsetof(Params, pools) == ABI_PARAMS_POOLS);
static_assert(offsetof(Params, report) == ABI_PARAMS_REPORT);
static_assert(offsetof(Params, num_ranks) == ABI_PARAMS_NUM_RANKS);
static_assert(offsetof(Params, virtual_ranks) == ABI_PARAMS_VIRTUAL_RANKS);
static_assert(offsetof(Params, first_rank) == ABI_PARAMS_FIRST_RANK);
static_assert(offsetof(Params, num_nodes) == ABI_PARAMS_NUM_NODES);
static_assert(offsetof(Params, num_tokens) == ABI_PARAMS_NUM_TOKENS);
static_assert(offsetof(Params, topk) == ABI_PARAMS_TOPK);
static_assert(offsetof(Params, num_experts) == ABI_PARAMS_NUM_EXPERTS);
static_assert(offsetof(Params, capacity) == ABI_PARAMS_CAPACITY);
static_assert(offsetof(Params, alignment) == ABI_PARAMS_ALIGNMENT);
static_assert(offsetof(Params, flags) == ABI_PARAMS_FLAGS);
static_assert(offsetof(Params, payload_bytes) == ABI_PARAMS_PAYLOAD_BYTES);
static_assert(offsetof(Params, slot_bytes) == ABI_PARAMS_SLOT_BYTES);
static_assert(offsetof(Params, chunk_tokens) == ABI_PARAMS_CHUNK_TOKENS);
static_assert(offsetof(Params, num_chunks) == ABI_PARAMS_NUM_CHUNKS);
static_assert(offsetof(Params, blocks_per_rank) == ABI_PARAMS_BLOCKS_PER_RANK);
static_assert(offsetof(Params, link_blocks) == ABI_PARAMS_LINK_BLOCKS);
static_assert(offsetof(Params, num_segments) == ABI_PARAMS_NUM_SEGMENTS);
static_assert(offsetof(Params, segment_ids) == ABI_PARAMS_SEGMENT_IDS);
static_assert(offsetof(Params, chunk_flags) == ABI_PARAMS_CHUNK_FLAGS);
static_assert(offsetof(Params, ids) == ABI_PARAMS_IDS);
static_assert(offsetof(Params, counts) == ABI_PARAMS_COUNTS);
static_assert(offsetof(Params, gates) == ABI_PARAMS_GATES);
static_assert(offsetof(Params, slots) == ABI_PARAMS_SLOTS);
static_assert(offsetof(Params, ids_stride) == ABI_PARAMS_IDS_STRIDE);
static_assert(offsetof(Params, counts_stride) == ABI_PARAMS_COUNTS_STRIDE);
static_assert(offsetof(Params, gates_stride) == ABI_PARAMS_GATES_STRIDE);
static_assert(offsetof(Params, slots_stride) == ABI_PARAMS_SLOTS_STRIDE);
static_assert(offsetof(Params, arrays) == ABI_PARAMS_ARRAYS);

static_assert(ABI_PLAN_WARPS * ABI_WARP_THREADS == ABI_PLAN_THREADS);
static_assert(ABI_DISPATCH_WARPS * ABI_WARP_THREADS == ABI_DISPATCH_THREADS);
static_assert(ABI_DISPATCH_SEND_WARPS < ABI_DISPATCH_WARPS);
static_assert(ABI_DISPATCH_STAGES - 2 == ABI_DISPATCH_PENDING_READS);
static_assert(ABI_DISPATCH_STAGES * ABI_DISPATCH_STAGE_BYTES == ABI_DISPATCH_RING_BYTES);
static_assert(ABI_DISPATCH_WARPS * ABI_DISPATCH_RING_BYTES == ABI_DISPATCH_LISTS_AT);
static_assert(ABI_DISPATCH_LISTS_AT + ABI_DISPATCH_WARPS * ABI_LIST_BYTES ==
              ABI_DISPATCH_SMEM_BYTES);
static_assert(ABI_DISPATCH_STAGES * ABI_BARRIER_BYTES == ABI_DISPATCH_WARP_BARRIER_BYTES);
static_assert(ABI_DISPATCH_WARPS * ABI_DISPATCH_WARP_BARRIER_BYTES == ABI_DISPATCH_BARRIERS_BYTES);
static_assert(ABI_LIST_ENTRY_BYTES * ABI_MAX_TOPK == ABI_LIST_TOKEN_BYTES);
static_assert(ABI_LIST_TOKEN_BYTES * ABI_MAX_CHUNK_TOKENS == ABI_LIST_BYTES);
static_assert(ABI_MAX_RANKS * 8 == ABI_TABLE_BYTES);
static_assert(ABI_COMBINE_WARPS * ABI_WARP_THREADS == ABI_COMBINE_THREADS);
static_assert(ABI_COMBINE_SUM_WARPS < ABI_COMBINE_WARPS);
static_assert(ABI_COMBINE_SLAB_BYTES * 2 == ABI_COMBINE_OUTER_SUM_BYTES);  // bf16 summed as f32
static_assert(ABI_COMBINE_WARPS * ABI_COMBINE_OUTER_SUM_BYTES == ABI_COMBINE_LISTS_AT);
static_assert(ABI_COMBINE_LISTS_AT + ABI_COMBINE_WARPS * ABI_LIST_BYTES ==
              ABI_COMBINE_NUM_TERMS_AT);
static_assert(ABI_MAX_CHUNK_TOKENS * 4 == ABI_COMBINE_NUM_TERMS_BYTES);
static_assert(ABI_COMBINE_NUM_TERMS_AT + ABI_COMBINE_WARPS * ABI_COMBINE_NUM_TERMS_BYTES ==
              ABI_COMBINE_SMEM_BYTES);
static_assert(ABI_PLAN_WARPS + 4 == ABI_PLAN_SMEM_ARRAYS);
static_assert(ABI_PLAN_SMEM_ARRAYS * 4 == ABI_PLAN_SMEM_BYTES_PER_ENTRY);
static_assert(ABI_POOL_JOIN_FLAGS + ABI_MAX_RANKS * ABI_FLAG_BYTES == ABI_POOL_PLAN_FLAGS);
static_assert(ABI_POOL_PLAN_FLAGS + ABI_PLAN_MAX_SEGMENTS * ABI_FLAG_BYTES <= ABI_POOL_HEAD_BYTES);
static_assert(ABI_POOL_WAIT_MAX + ABI_MAX_RANKS * 8 == ABI_POOL_WAIT_TOTAL);
static_assert(ABI_POOL_WAIT_TOTAL + ABI_NUM_OPERATIONS * ABI_MAX_RANKS * 8 <=
              ABI_POOL_CLAIMED_SENDS);
static_assert(ABI_POOL_CLAIMED_RECEIVES < ABI_POOL_JOIN_FLAGS);
static_assert(ABI_REPORT_RECORDS + ABI_MAX_RANKS * ABI_REPORT_RECORD_BYTES <= ABI_REPORT_WAITS);
static_assert(ABI_REPORT_WAITS + ABI_MAX_RANKS * ABI_NUM_OPERATIONS * ABI_MAX_RANKS * 8 ==
              ABI_REPORT_BYTES);

// Index into Params::arrays of an ABI_PLAN_*, ABI_DISPATCH_* or ABI_COMBINE_* offset.
constexpr int ArraySlot(int offset) { return (offset - ABI_PARAMS_ARRAYS) / 8; }

// What the host reads of a record in the report, in its own byte order; see ABI_RECORD_*.
struct Record {
  uint32_t valid;
  uint32_t operation;
  uint32_t phase;
  uint32_t rank;
  uint32_t peer;
  uint32_t index;  // chunk or segment waited for
  uint64_t expected;
  uint64_t seen;
  uint64_t waited_ns;
  uint64_t unused[2];
};
static_assert(sizeof(Record) == ABI_REPORT_RECORD_BYTES);
static_assert(offsetof(Record, valid) == ABI_RECORD_VALID);
static_assert(offsetof(Record, operation) == ABI_RECORD_OPERATION);
static_assert(offsetof(Record, phase) == ABI_RECORD_PHASE);
static_assert(offsetof(Record, rank) == ABI_RECORD_RANK);
static_assert(offsetof(Record, peer) == ABI_RECORD_PEER);
static_assert(offsetof(Record, index) == ABI_RECORD_INDEX);
static_assert(offsetof(Record, expected) == ABI_RECORD_EXPECTED);
static_assert(offsetof(Record, seen) == ABI_RECORD_SEEN);
static_assert(offsetof(Record, waited_ns) == ABI_RECORD_WAITED_NS);

// Plan: segments of one source rank's ids.
constexpr uint32_t NumSegments(uint32_t num_ranks) {
  return num_ranks >= ABI_PLAN_MAX_SEGMENTS ? 1 : ABI_PLAN_MAX_SEGMENTS / num_ranks;
}
constexpr uint32_t SegmentIds(uint32_t num_ranks, uint64_t num_ids) {
  return static_cast<uint32_t>(
      AlignUp(CeilDiv(num_ids, NumSegments(num_ranks)), ABI_PLAN_SEGMENT_ALIGN_IDS));
}
// One row of counts: an entry per expert, then the number of invalid ids, padded to whole vectors.
constexpr uint32_t CountRow(uint32_t num_experts) {
  return static_cast<uint32_t>(AlignUp(num_experts + 1, ABI_PLAN_COUNT_ALIGN));
}
constexpr uint32_t SlotBytes(uint32_t payload_bytes) {
  return static_cast<uint32_t>(AlignUp(payload_bytes, ABI_POOL_ALIGN));
}

// Bytes a call needs of each pool region (one parity where there are two).
struct RegionBytes {
  uint64_t chunk_flags;  // u64 [num_ranks, chunks], at most tokens: arrival of (source, chunk)
  uint64_t ids;          // u16 [num_ranks, segments, segment_ids]
  uint64_t counts;       // u32 [num_ranks, segments, count row]
  uint64_t gates;        // f32 [num_ranks, tokens, topk]
  uint64_t slots;        // bytes [num_ranks, tokens, slot_bytes]

  static constexpr RegionBytes Of(uint64_t num_ranks, uint64_t tokens, uint64_t topk,
                                  uint32_t experts, uint32_t payload_bytes) {
    const uint64_t segments = num_ranks * NumSegments(static_cast<uint32_t>(num_ranks));
    RegionBytes bytes{};
    bytes.chunk_flags = num_ranks * (tokens > 0 ? tokens : 1) * ABI_FLAG_BYTES;
    bytes.ids = segments * SegmentIds(static_cast<uint32_t>(num_ranks), tokens * topk) * 2;
    bytes.counts = segments * CountRow(experts) * 4;
    bytes.gates = num_ranks * tokens * topk * 4;
    bytes.slots = num_ranks * tokens * SlotBytes(payload_bytes);
    return bytes;
  }
};

// Where a pool's regions lie. One walk gives offsets and size; every region but the flags exists
// twice, once per epoch parity.
struct PoolLayout {
  RegionBytes room;
  uint64_t chunk_flags;
  uint64_t ids;
  uint64_t counts;
  uint64_t gates;
  uint64_t slots;
  uint64_t ids_stride;
  uint64_t counts_stride;
  uint64_t gates_stride;
  uint64_t slots_stride;
  uint64_t size;

  // Room for every call with at most these sizes. `guard_bytes` (a multiple of ABI_POOL_ALIGN) stay
  // unused before each half of each region and after the last; tests keep a pattern there.
  static constexpr PoolLayout Make(uint32_t num_ranks, uint32_t max_tokens, uint32_t max_topk,
                                   uint32_t max_experts, uint32_t max_payload_bytes,
                                   uint64_t guard_bytes = 0) {
    PoolLayout layout{};
    layout.room = RegionBytes::Of(num_ranks, max_tokens, max_topk, max_experts, max_payload_bytes);
    uint64_t end = ABI_POOL_HEAD_BYTES;
    auto place = [&](uint64_t bytes, uint64_t halves, uint64_t& offset) -> uint64_t {
      const uint64_t stride = AlignUp(bytes, ABI_POOL_ALIGN) + guard_bytes;
      offset = end + guard_bytes;
      end += stride * halves;
      return stride;
    };
    place(layout.room.chunk_flags, 1, layout.chunk_flags);
    layout.ids_stride = place(layout.room.ids, 2, layout.ids);
    layout.counts_stride = place(layout.room.counts, 2, layout.counts);
    layout.gates_stride = place(layout.room.gates, 2, layout.gates);
    layout.slots_stride = place(layout.room.slots, 2, layout.slots);
    layout.size = end + guard_bytes;
    return layout;
  }

  // Whether a call of this shape fits a pool made for the sizes above.
  constexpr bool Fits(const CallShape& call) const {
    const RegionBytes need = RegionBytes::Of(call.num_ranks, call.num_tokens, call.topk,
                                             call.num_experts, call.payload_bytes);
    return need.chunk_flags <= room.chunk_flags && need.ids <= room.ids &&
           need.counts <= room.counts && need.gates <= room.gates && need.slots <= room.slots;
  }
};

// Tokens a chunk: few enough that every sending warp gets several, which keeps the tail short, but
// not so few that more than 32768 flags are set at a rank. The ranks of a group must come to the
// same number. plan has no chunks.
constexpr uint32_t DefaultChunkTokens(int operation, uint32_t num_ranks, uint32_t num_tokens,
                                      uint32_t blocks_per_rank, uint32_t link_blocks) {
  if (operation == ABI_OPERATION_PLAN) return 1;
  const bool dispatch = operation == ABI_OPERATION_DISPATCH;
  const uint32_t all = dispatch ? ABI_DISPATCH_WARPS : ABI_COMBINE_WARPS;
  const uint32_t some = dispatch ? ABI_DISPATCH_SEND_WARPS : ABI_COMBINE_SUM_WARPS;
  const uint32_t warps = link_blocks < blocks_per_rank ? link_blocks * all : blocks_per_rank * some;
  const uint64_t for_tail = num_tokens / (8 * (warps > 0 ? warps : 1));
  const uint64_t for_flags = CeilDiv(static_cast<uint64_t>(num_ranks) * num_tokens, 32768);
  const uint64_t wanted = for_tail > for_flags ? for_tail : for_flags;
  if (wanted < 1) return 1;
  return wanted > ABI_MAX_CHUNK_TOKENS ? ABI_MAX_CHUNK_TOKENS : static_cast<uint32_t>(wanted);
}

// All of Params but pools, report and arrays. The ranks of a group must agree on chunk_tokens.
constexpr Params MakeParams(const CallShape& call, const PoolLayout& layout,
                            uint32_t blocks_per_rank, uint32_t link_blocks, uint32_t chunk_tokens) {
  Params params{};
  params.num_ranks = call.num_ranks;
  params.virtual_ranks = call.virtual_ranks;
  params.first_rank = call.first_rank;
  params.num_nodes = call.num_nodes;
  params.num_tokens = call.num_tokens;
  params.topk = call.topk;
  params.num_experts = call.num_experts;
  params.capacity = call.capacity;
  params.alignment = call.alignment;
  params.flags = (call.zero_tail ? ABI_FLAG_ZERO_TAIL : 0) | (call.bf16 ? ABI_FLAG_BF16 : 0);
  params.payload_bytes = call.payload_bytes;
  params.slot_bytes = SlotBytes(call.payload_bytes);
  params.chunk_tokens = chunk_tokens;
  const uint32_t chunks = static_cast<uint32_t>(CeilDiv(call.num_tokens, chunk_tokens));
  params.num_chunks = chunks > 0 ? chunks : 1;
  params.blocks_per_rank = blocks_per_rank;
  params.link_blocks = link_blocks;
  params.num_segments = NumSegments(call.num_ranks);
  params.segment_ids =
      SegmentIds(call.num_ranks, static_cast<uint64_t>(call.num_tokens) * call.topk);
  params.chunk_flags = layout.chunk_flags;
  params.ids = layout.ids;
  params.counts = layout.counts;
  params.gates = layout.gates;
  params.slots = layout.slots;
  params.ids_stride = layout.ids_stride;
  params.counts_stride = layout.counts_stride;
  params.gates_stride = layout.gates_stride;
  params.slots_stride = layout.slots_stride;
  return params;
}

constexpr uint32_t PlanSmemBytes(uint32_t num_experts) {
  return ABI_PLAN_SMEM_BYTES_PER_ENTRY * CountRow(num_experts);
}

}  // namespace jax_moe::ptx

#endif  // JAX_MOE_PTX_PARAMS_H_
