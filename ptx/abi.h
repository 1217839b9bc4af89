// The contract between the host (C++) and the kernels (PTX): sizes, offsets, limits and codes, each
// stated once.
//
// Both languages include this file, so every value is a bare decimal literal: no suffix, no
// parentheses, no expression (ptxas takes neither in array sizes). Relations between values are
// asserted in params.h.
#ifndef JAX_MOE_PTX_ABI_H_
#define JAX_MOE_PTX_ABI_H_

// ---- The PTX dialect. Low on purpose: every driver that knows Hopper can compile the text itself.
#define ABI_PTX_VERSION 8.0
#define ABI_PTX_TARGET sm_90

// ---- Limits of one call.
#define ABI_MAX_RANKS 64
#define ABI_MAX_TOPK 16
#define ABI_MAX_EXPERTS 2048
#define ABI_MAX_PAYLOAD_BYTES 65536
#define ABI_MAX_CHUNK_TOKENS 8

// ---- Launch shapes. Every grid is virtual_ranks * blocks_per_rank blocks, launched cooperatively;
// block i serves virtual rank i % virtual_ranks as its block i / virtual_ranks. SEND_WARPS and
// SUM_WARPS: warps of a block that begin by sending when every block sends (link_blocks ==
// blocks_per_rank).
#define ABI_WARP_THREADS 32
#define ABI_PLAN_WARPS 16
#define ABI_PLAN_THREADS 512
#define ABI_DISPATCH_WARPS 12
#define ABI_DISPATCH_SEND_WARPS 4
#define ABI_DISPATCH_THREADS 384
#define ABI_COMBINE_WARPS 16
#define ABI_COMBINE_SUM_WARPS 11
#define ABI_COMBINE_THREADS 512

// ---- Dynamic shared memory: byte offsets and sizes. plan's depends on the experts: this many
// bytes for each entry of a count row.
#define ABI_PLAN_SMEM_ARRAYS 20
#define ABI_PLAN_SMEM_BYTES_PER_ENTRY 80
// dispatch: per warp a ring of stages and a list of 8 tokens x 16 destinations.
#define ABI_DISPATCH_STAGES 2
#define ABI_DISPATCH_PENDING_READS 0
#define ABI_DISPATCH_STAGE_BYTES 8192
#define ABI_DISPATCH_RING_BYTES 16384
#define ABI_DISPATCH_LISTS_AT 196608
#define ABI_DISPATCH_SMEM_BYTES 208896
// combine: per warp the outer sum of one slab, a list of 8 tokens x 16 terms, and each token's
// number of terms.
#define ABI_COMBINE_SLAB_BYTES 2048
#define ABI_COMBINE_OUTER_SUM_BYTES 4096
#define ABI_COMBINE_LISTS_AT 65536
#define ABI_COMBINE_NUM_TERMS_AT 81920
#define ABI_COMBINE_NUM_TERMS_BYTES 32
#define ABI_COMBINE_SMEM_BYTES 82432
// A list: one 8-byte entry for each of 16 choices of each of 8 tokens.
#define ABI_LIST_ENTRY_BYTES 8
#define ABI_LIST_TOKEN_BYTES 128
#define ABI_LIST_BYTES 1024
// Static shared memory: the pool table, one barrier for each stage of each dispatch warp.
#define ABI_TABLE_BYTES 512
#define ABI_BARRIER_BYTES 8
#define ABI_DISPATCH_WARP_BARRIER_BYTES 16
#define ABI_DISPATCH_BARRIERS_BYTES 192

// ---- Plan: the ids of one source are cut into segments, at most 128 over all sources.
#define ABI_PLAN_MAX_SEGMENTS 128
#define ABI_PLAN_SEGMENT_ALIGN_IDS 8
#define ABI_PLAN_COUNT_ALIGN 4
#define ABI_NO_EXPERT_ID 65535

// ---- struct Params: the one kernel parameter (by value). Field, type and filler stand in
// params.h.
#define ABI_PARAMS_BYTES 256
#define ABI_PARAMS_POOLS 0
#define ABI_PARAMS_REPORT 8
#define ABI_PARAMS_NUM_RANKS 16
#define ABI_PARAMS_VIRTUAL_RANKS 20
#define ABI_PARAMS_FIRST_RANK 24
#define ABI_PARAMS_NUM_NODES 28
#define ABI_PARAMS_NUM_TOKENS 32
#define ABI_PARAMS_TOPK 36
#define ABI_PARAMS_NUM_EXPERTS 40
#define ABI_PARAMS_CAPACITY 44
#define ABI_PARAMS_ALIGNMENT 48
#define ABI_PARAMS_FLAGS 52
#define ABI_PARAMS_PAYLOAD_BYTES 56
#define ABI_PARAMS_SLOT_BYTES 60
#define ABI_PARAMS_CHUNK_TOKENS 64
#define ABI_PARAMS_NUM_CHUNKS 68
#define ABI_PARAMS_BLOCKS_PER_RANK 72
#define ABI_PARAMS_LINK_BLOCKS 76
#define ABI_PARAMS_NUM_SEGMENTS 80
#define ABI_PARAMS_SEGMENT_IDS 84
#define ABI_PARAMS_CHUNK_FLAGS 88
#define ABI_PARAMS_IDS 96
#define ABI_PARAMS_COUNTS 104
#define ABI_PARAMS_GATES 112
#define ABI_PARAMS_SLOTS 120
#define ABI_PARAMS_IDS_STRIDE 128
#define ABI_PARAMS_COUNTS_STRIDE 136
#define ABI_PARAMS_GATES_STRIDE 144
#define ABI_PARAMS_SLOTS_STRIDE 152
#define ABI_PARAMS_ARRAYS 160

// Arrays of each operation, in units of 8 bytes from ABI_PARAMS_ARRAYS (the offsets below are
// absolute).
#define ABI_PLAN_EXPERT_IDS_IN 160
#define ABI_PLAN_EXPERT_IDS 168
#define ABI_PLAN_POSITIONS 176
#define ABI_PLAN_SOURCES 184
#define ABI_PLAN_ARRIVALS 192
#define ABI_PLAN_GROUP_SIZES 200
#define ABI_PLAN_PADDED_GROUP_SIZES 208
#define ABI_PLAN_DROPPED 216
#define ABI_PLAN_INVALID 224

#define ABI_DISPATCH_X 160
#define ABI_DISPATCH_S 168
#define ABI_DISPATCH_EXPERT_IDS 176
#define ABI_DISPATCH_POSITIONS 184
#define ABI_DISPATCH_SOURCES 192
#define ABI_DISPATCH_ARRIVALS 200
#define ABI_DISPATCH_PADDED_GROUP_SIZES 208
#define ABI_DISPATCH_ROWS 216
#define ABI_DISPATCH_ROW_S 224

#define ABI_COMBINE_ROWS 160
#define ABI_COMBINE_ROW_S 168
#define ABI_COMBINE_EXPERT_IDS 176
#define ABI_COMBINE_POSITIONS 184
#define ABI_COMBINE_ARRIVALS 192
#define ABI_COMBINE_Y 200
#define ABI_COMBINE_S 208

// Bits of ABI_PARAMS_FLAGS.
#define ABI_FLAG_ZERO_TAIL 1
#define ABI_FLAG_BF16 2

// ---- The pool: one per rank, device memory, mapped by every peer. Its first 8192 bytes have a
// fixed layout; the five regions after it lie where struct PoolLayout (params.h) puts them.
#define ABI_POOL_ALIGN 128
#define ABI_POOL_HEAD_BYTES 8192
// Control words: used by this rank's own kernels only, except the abort word, which peers may set.
#define ABI_POOL_EPOCH 0
#define ABI_POOL_EXITS 128
#define ABI_POOL_BUSY 256
#define ABI_POOL_ABORT 384
#define ABI_POOL_REPORTED 448
#define ABI_POOL_CLAIMED_SENDS 2560
#define ABI_POOL_CLAIMED_RECEIVES 2688
#define ABI_POOL_WAIT_MAX 512
#define ABI_POOL_WAIT_TOTAL 1024
// Epoch flags written by peers: one a source rank (joined), one a (source, segment) (plan).
#define ABI_POOL_JOIN_FLAGS 4096
#define ABI_POOL_PLAN_FLAGS 4608
#define ABI_FLAG_BYTES 8

// ---- The report: one page run per group and device in host memory mapped into the device.
#define ABI_REPORT_JOIN_TIMEOUT_NS 0
#define ABI_REPORT_FLIGHT_TIMEOUT_NS 8
#define ABI_REPORT_HOST_ABORT 16
#define ABI_REPORT_RECORDS 128
#define ABI_REPORT_RECORD_BYTES 64
#define ABI_REPORT_WAITS 8192
#define ABI_REPORT_BYTES 106496

// One record per virtual rank. VALID is written last (release) and is never cleared by a kernel.
#define ABI_RECORD_VALID 0
#define ABI_RECORD_OPERATION 4
#define ABI_RECORD_PHASE 8
#define ABI_RECORD_RANK 12
#define ABI_RECORD_PEER 16
#define ABI_RECORD_INDEX 20
#define ABI_RECORD_EXPECTED 24
#define ABI_RECORD_SEEN 32
#define ABI_RECORD_WAITED_NS 40

// Operations, from 1 so that 0 means "none".
#define ABI_NUM_OPERATIONS 3
#define ABI_OPERATION_PLAN 1
#define ABI_OPERATION_DISPATCH 2
#define ABI_OPERATION_COMBINE 3

// Phases of a record.
#define ABI_PHASE_JOIN 1
#define ABI_PHASE_ARRIVE 2
#define ABI_PHASE_OVERLAP 3
#define ABI_PHASE_ABORTED 4

// The abort word: 0, or 1 + the rank that gave up first; the host's own abort reads as 1 +
// ABI_HOST_ABORT_RANK.
#define ABI_HOST_ABORT_RANK 255

// ---- Waiting. A wait polls this often before it looks at clocks, deadlines and abort words.
#define ABI_WAIT_FAST_POLLS 16
#define ABI_WAIT_SLEEP_NS 64
// Polls between two looks at this rank's abort word; a power of two less one.
#define ABI_WAIT_ABORT_MASK 63
// Time between two looks at the deadline and the host's words: no timeout is kept more finely than
// this.
#define ABI_WAIT_LOOK_NS 1000000

#endif  // JAX_MOE_PTX_ABI_H_
