#include "cuda_handlers.h"

#include <array>
#include <initializer_list>
#include <string>

#include "cuda_registry.h"
#include "ffi_status.h"
#include "ptx/params.h"

namespace jax_moe {

namespace ffi = xla::ffi;

namespace {

// What every target carries; all else comes from the shapes.
struct CudaAttributes {
  int64_t group;
  int64_t num_ranks;
  int64_t virtual_ranks;
  int64_t num_nodes;
  int64_t num_experts;
  int64_t alignment;
  int64_t zero_tail;
  int64_t num_sms;
  int64_t link_sms;
};

}  // namespace
}  // namespace jax_moe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_moe::CudaAttributes,                 //
                                      StructMember<int64_t>("group"),          //
                                      StructMember<int64_t>("num_ranks"),      //
                                      StructMember<int64_t>("virtual_ranks"),  //
                                      StructMember<int64_t>("num_nodes"),      //
                                      StructMember<int64_t>("num_experts"),    //
                                      StructMember<int64_t>("alignment"),      //
                                      StructMember<int64_t>("zero_tail"),      //
                                      StructMember<int64_t>("num_sms"),        //
                                      StructMember<int64_t>("link_sms"));

namespace jax_moe {
namespace {

using Ids = ffi::Buffer<ffi::S32, 2>;
using Ints = ffi::Buffer<ffi::S32, 1>;
using Scales = ffi::Buffer<ffi::F32, 2>;
using RowScales = ffi::Buffer<ffi::F32, 1>;
using Payload = ffi::AnyBuffer;

// Gathers a call's sizes and pointers; `error` keeps the first thing that is wrong.
class CallBuilder {
 public:
  CallBuilder(int operation, const CudaAttributes& attributes) : operation_(operation) {
    call_.operation = operation;
    call_.num_sms = attributes.num_sms;
    call_.link_sms = attributes.link_sms;
    auto& shape = call_.shape;
    shape.num_ranks = Positive("num_ranks", attributes.num_ranks);
    shape.virtual_ranks = Positive("virtual_ranks", attributes.virtual_ranks);
    shape.num_nodes = Positive("num_nodes", attributes.num_nodes);
    shape.num_experts = Positive("num_experts", attributes.num_experts);
    shape.alignment = Positive("alignment", attributes.alignment);
    shape.zero_tail = attributes.zero_tail != 0;
    local_experts_ = attributes.virtual_ranks * (attributes.num_experts / shape.num_ranks);
  }

  void SetTokens(int64_t num_tokens, int64_t top_k) {
    tokens_ = num_tokens;
    top_k_ = top_k;
    call_.shape.num_tokens = PerRank("tokens", num_tokens);
    call_.shape.topk = Positive("top_k", top_k);
  }
  void SetRows(int64_t num_rows) {
    rows_ = num_rows;
    call_.shape.capacity = PerRank("rows", num_rows);
  }
  void SetPayload(const Payload& payload) {
    call_.shape.bf16 = payload.element_type() == ffi::BF16;
    if (payload.element_type() != ffi::BF16 && payload.element_type() != ffi::F32) {
      Fail("tokens and rows must be float32 or bfloat16; cast them");
    }
    if (payload.dimensions().size() != 2) return Fail("tokens and rows must have two dimensions");
    hidden_ = payload.dimensions()[1];
    const int64_t bytes = hidden_ * (call_.shape.bf16 ? 2 : 4);
    call_.shape.payload_bytes =
        static_cast<uint32_t>(bytes < int64_t{1} << 31 ? bytes : (int64_t{1} << 31) - 1);
  }

  // Takes the buffer as the array of that name in ptx/abi.h, after checking its shape.
  template <typename Buffer>
  void Take(const char* name, int abi_offset, const Buffer& buffer,
            std::initializer_list<int64_t> shape) {
    const auto dimensions = buffer.dimensions();
    if (!std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end())) {
      Fail(std::string(name) + " has the wrong shape; call the functions of jax_moe");
    }
    const void* data = buffer.untyped_data();
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      Fail(std::string(name) +
           " does not start at a multiple of 16 bytes, as a slice of another array may; put "
           "jax.lax.optimization_barrier around the operand so that XLA copies it");
    }
    arrays_[ptx::ArraySlot(abi_offset)] = data;
  }
  void TakePayload(const char* name, int abi_offset, const Payload& buffer, int64_t length) {
    const bool bf16 = buffer.element_type() == ffi::BF16;
    if (bf16 != call_.shape.bf16 || (!bf16 && buffer.element_type() != ffi::F32)) {
      Fail(std::string(name) + " must have the type of the operand");
    }
    Take(name, abi_offset, buffer, {length, hidden_});
  }

  ffi::Error Launch(int64_t key, int32_t ordinal, cuda::Stream stream) {
    if (!error_.empty()) return ffi::Error::InvalidArgument(error_);
    const auto group = cuda::FindGroup(key);
    if (group == nullptr) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        std::string("jax_moe_") + cuda::OperationName(operation_) +
                            ": this process has no such group; build the ExpertGroup on the same "
                            "mesh before running the program");
    }
    // Group::Launch (cuda_group.cc) finds the pools, fills ptx::Params (arrays: the buffers taken
    // above) and starts the kernel jax_moe_<operation> of ptx/<operation>.ptx.
    const Status status = group->Launch(ordinal, call_, arrays_, stream);
    return status.ok() ? ffi::Error::Success() : ffi::Error(CodeOf(status.code), status.message);
  }

  int64_t tokens() const { return tokens_; }
  int64_t top_k() const { return top_k_; }
  int64_t rows() const { return rows_; }
  int64_t local_experts() const { return local_experts_; }
  int64_t virtual_ranks() const { return call_.shape.virtual_ranks; }
  int64_t arrivals() const { return call_.shape.num_ranks * tokens_; }

 private:
  uint32_t Positive(const char* name, int64_t value) {
    if (value > 0 && value < int64_t{1} << 31) return static_cast<uint32_t>(value);
    Fail(std::string(name) + "=" + std::to_string(value) + " must be >= 1 and < 2**31");
    return 1;
  }
  uint32_t PerRank(const char* name, int64_t total) {
    const uint32_t virtual_ranks = call_.shape.virtual_ranks;
    if (total % virtual_ranks != 0) {
      Fail(std::to_string(total) + " " + name + " are not a multiple of virtual_ranks");
    }
    return Positive(name, total / virtual_ranks);
  }
  void Fail(const std::string& message) {
    if (error_.empty()) {
      error_ = std::string("jax_moe_") + cuda::OperationName(operation_) + ": " + message;
    }
  }

  int operation_;
  cuda::Call call_;
  std::array<const void*, cuda::kNumArrays> arrays_ = {};
  int64_t tokens_ = 0, top_k_ = 0, rows_ = 0, hidden_ = 0, local_experts_ = 0;
  std::string error_;
};

ffi::Error Plan(cuda::Stream stream, int32_t ordinal, Ids expert_ids, ffi::Result<Ids> valid_ids,
                ffi::Result<Ids> positions, ffi::Result<Ints> sources,
                ffi::Result<Ints> group_sizes, ffi::Result<Ints> padded_group_sizes,
                ffi::Result<Ints> dropped, ffi::Result<Ints> invalid, ffi::Result<Ids> arrivals,
                CudaAttributes attributes) {
  CallBuilder call(ABI_OPERATION_PLAN, attributes);
  call.SetTokens(expert_ids.dimensions()[0], expert_ids.dimensions()[1]);
  call.SetRows(sources->dimensions()[0]);
  const auto tokens = call.tokens(), top_k = call.top_k(), local = call.local_experts();
  call.Take("expert_ids", ABI_PLAN_EXPERT_IDS_IN, expert_ids, {tokens, top_k});
  call.Take("expert_ids", ABI_PLAN_EXPERT_IDS, *valid_ids, {tokens, top_k});
  call.Take("positions", ABI_PLAN_POSITIONS, *positions, {tokens, top_k});
  call.Take("sources", ABI_PLAN_SOURCES, *sources, {call.rows()});
  call.Take("group_sizes", ABI_PLAN_GROUP_SIZES, *group_sizes, {local});
  call.Take("padded_group_sizes", ABI_PLAN_PADDED_GROUP_SIZES, *padded_group_sizes, {local});
  call.Take("dropped", ABI_PLAN_DROPPED, *dropped, {local});
  call.Take("invalid", ABI_PLAN_INVALID, *invalid, {call.virtual_ranks()});
  call.Take("arrivals", ABI_PLAN_ARRIVALS, *arrivals, {call.arrivals(), top_k});
  return call.Launch(attributes.group, ordinal, stream);
}

ffi::Error Dispatch(cuda::Stream stream, int32_t ordinal, Payload x, Scales s, Ids expert_ids,
                    Ids positions, Ints sources, Ids arrivals, Ints padded_group_sizes,
                    ffi::Result<Payload> rows, ffi::Result<RowScales> row_s,
                    CudaAttributes attributes) {
  CallBuilder call(ABI_OPERATION_DISPATCH, attributes);
  call.SetTokens(s.dimensions()[0], s.dimensions()[1]);
  call.SetRows(sources.dimensions()[0]);
  call.SetPayload(x);
  const auto tokens = call.tokens(), top_k = call.top_k(), num_rows = call.rows();
  call.TakePayload("x", ABI_DISPATCH_X, x, tokens);
  call.Take("s", ABI_DISPATCH_S, s, {tokens, top_k});
  call.Take("expert_ids", ABI_DISPATCH_EXPERT_IDS, expert_ids, {tokens, top_k});
  call.Take("positions", ABI_DISPATCH_POSITIONS, positions, {tokens, top_k});
  call.Take("sources", ABI_DISPATCH_SOURCES, sources, {num_rows});
  call.Take("arrivals", ABI_DISPATCH_ARRIVALS, arrivals, {call.arrivals(), top_k});
  call.Take("padded_group_sizes", ABI_DISPATCH_PADDED_GROUP_SIZES, padded_group_sizes,
            {call.local_experts()});
  call.TakePayload("rows", ABI_DISPATCH_ROWS, *rows, num_rows);
  call.Take("row_s", ABI_DISPATCH_ROW_S, *row_s, {num_rows});
  return call.Launch(attributes.group, ordinal, stream);
}

ffi::Error Combine(cuda::Stream stream, int32_t ordinal, Payload rows, RowScales row_s,
                   Ids expert_ids, Ids positions, Ids arrivals, ffi::Result<Payload> y,
                   ffi::Result<Scales> s, CudaAttributes attributes) {
  CallBuilder call(ABI_OPERATION_COMBINE, attributes);
  call.SetTokens(expert_ids.dimensions()[0], expert_ids.dimensions()[1]);
  call.SetRows(row_s.dimensions()[0]);
  call.SetPayload(rows);
  const auto tokens = call.tokens(), top_k = call.top_k();
  call.TakePayload("rows", ABI_COMBINE_ROWS, rows, call.rows());
  call.Take("row_s", ABI_COMBINE_ROW_S, row_s, {call.rows()});
  call.Take("expert_ids", ABI_COMBINE_EXPERT_IDS, expert_ids, {tokens, top_k});
  call.Take("positions", ABI_COMBINE_POSITIONS, positions, {tokens, top_k});
  call.Take("arrivals", ABI_COMBINE_ARRIVALS, arrivals, {call.arrivals(), top_k});
  call.TakePayload("y", ABI_COMBINE_Y, *y, tokens);
  call.Take("s", ABI_COMBINE_S, *s, {tokens, top_k});
  return call.Launch(attributes.group, ordinal, stream);
}

auto BindPlan() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cuda::Stream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Ids>()   // expert_ids i32[V*T, K]
      .Ret<Ids>()   // expert_ids i32[V*T, K]
      .Ret<Ids>()   // positions i32[V*T, K]
      .Ret<Ints>()  // sources i32[V*C]
      .Ret<Ints>()  // group_sizes i32[V*E/R]
      .Ret<Ints>()  // padded_group_sizes i32[V*E/R]
      .Ret<Ints>()  // dropped i32[V*E/R]
      .Ret<Ints>()  // invalid i32[V]
      .Ret<Ids>()   // arrivals i32[V*R*T, K]
      .Attrs<CudaAttributes>();
}

auto BindDispatch() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cuda::Stream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Payload>()    // x f32|bf16[V*T, H]
      .Arg<Scales>()     // s f32[V*T, K]
      .Arg<Ids>()        // expert_ids i32[V*T, K]
      .Arg<Ids>()        // positions i32[V*T, K]
      .Arg<Ints>()       // sources i32[V*C]
      .Arg<Ids>()        // arrivals i32[V*R*T, K]
      .Arg<Ints>()       // padded_group_sizes i32[V*E/R]
      .Ret<Payload>()    // rows f32|bf16[V*C, H]
      .Ret<RowScales>()  // row_s f32[V*C]
      .Attrs<CudaAttributes>();
}

auto BindCombine() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cuda::Stream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Payload>()    // rows f32|bf16[V*C, H]
      .Arg<RowScales>()  // row_s f32[V*C]
      .Arg<Ids>()        // expert_ids i32[V*T, K]
      .Arg<Ids>()        // positions i32[V*T, K]
      .Arg<Ids>()        // arrivals i32[V*R*T, K]
      .Ret<Payload>()    // y f32|bf16[V*T, H]
      .Ret<Scales>()     // s f32[V*T, K]
      .Attrs<CudaAttributes>();
}

}  // namespace

// Each handler twice: one that XLA may capture into a CUDA graph, one that it may not. _ffi.py
// picks.
#define JAX_MOE_CUDA_HANDLER(name, implementation, binding)                                        \
  XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame) {                                             \
    XLA_FFI_DEFINE_HANDLER(handler, implementation, binding, {ffi::Traits::kCmdBufferCompatible}); \
    return (*handler)(call_frame);                                                                 \
  }                                                                                                \
  XLA_FFI_Error* name##Uncaptured(XLA_FFI_CallFrame* call_frame) {                                 \
    XLA_FFI_DEFINE_HANDLER(handler, implementation, binding);                                      \
    return (*handler)(call_frame);                                                                 \
  }

JAX_MOE_CUDA_HANDLER(CudaPlan, Plan, BindPlan())
JAX_MOE_CUDA_HANDLER(CudaDispatch, Dispatch, BindDispatch())
JAX_MOE_CUDA_HANDLER(CudaCombine, Combine, BindCombine())

}  // namespace jax_moe
