#include "cpu_handlers.h"

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cpu_operations.h"
#include "cpu_rendezvous.h"
#include "ffi_status.h"

// A library built with newer headers is refused by older runtimes, in part silently.
static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR <= 4,
              "jax_moe: build against the headers of jaxlib 0.11.2, the oldest supported one "
              "(let pip build in isolation, or install jaxlib==0.11.2 to build)");

namespace jax_moe {

namespace ffi = xla::ffi;

namespace {

// The state that XLA keeps per call site.
struct CpuState {
  static ffi::TypeId id;
  CallSite site;
};
ffi::TypeId CpuState::id = {};

// What every target carries; all else comes from the shapes.
struct Attributes {
  int64_t group;
  int64_t num_ranks;
  int64_t virtual_ranks;
  int64_t num_nodes;
  int64_t num_experts;
  int64_t alignment;
  int64_t zero_tail;
};

}  // namespace
}  // namespace jax_moe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_moe::Attributes,                     //
                                      StructMember<int64_t>("group"),          //
                                      StructMember<int64_t>("num_ranks"),      //
                                      StructMember<int64_t>("virtual_ranks"),  //
                                      StructMember<int64_t>("num_nodes"),      //
                                      StructMember<int64_t>("num_experts"),    //
                                      StructMember<int64_t>("alignment"),      //
                                      StructMember<int64_t>("zero_tail"));

namespace jax_moe {
namespace {

using Where = ffi::Buffer<ffi::S32, 1>;
using Ids = ffi::Buffer<ffi::S32, 2>;
using Ints = ffi::Buffer<ffi::S32, 1>;
using Scales = ffi::Buffer<ffi::F32, 2>;
using RowScales = ffi::Buffer<ffi::F32, 1>;

// Collects what is wrong with a call's buffers, and makes its spec on the way.
class SpecBuilder {
 public:
  SpecBuilder(OperationKind kind, const Attributes& attributes) {
    spec_.kind = kind;
    spec_.group_key = attributes.group;
    spec_.num_ranks = attributes.num_ranks;
    spec_.virtual_ranks = attributes.virtual_ranks;
    spec_.num_nodes = attributes.num_nodes;
    spec_.num_experts = attributes.num_experts;
    spec_.alignment = attributes.alignment;
    spec_.zero_tail = attributes.zero_tail;
    error_ = Check(spec_);
  }

  void SetTokens(int64_t num_tokens, int64_t top_k) {
    spec_.tokens = PerRank("tokens", num_tokens);
    spec_.top_k = top_k;
  }
  void SetCapacity(int64_t num_rows) { spec_.capacity = PerRank("rows", num_rows); }

  void SetPayload(ffi::AnyBuffer payload) {
    if (payload.element_type() == ffi::F32) {
      spec_.payload = PayloadType::kFloat32;
    } else if (payload.element_type() == ffi::BF16) {
      spec_.payload = PayloadType::kBFloat16;
    } else {
      Fail("x and rows must be float32 or bfloat16; cast them");
    }
    if (payload.dimensions().size() != 2) return Fail("x and rows must have two dimensions");
    spec_.hidden = payload.dimensions()[1];
  }

  template <typename Buffer>
  void Expect(const char* name, const Buffer& buffer, std::initializer_list<int64_t> shape) {
    const auto dimensions = buffer.dimensions();
    if (!std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end())) {
      Fail(std::string(name) +
           " has the wrong shape; call the functions of jax_moe, which shape it");
    }
  }

  // `buffer` is a result of the payload's type.
  void ExpectPayload(const char* name, ffi::AnyBuffer buffer,
                     std::initializer_list<int64_t> shape) {
    Expect(name, buffer, shape);
    const bool is_bfloat16 = spec_.payload == PayloadType::kBFloat16;
    if (buffer.element_type() != (is_bfloat16 ? ffi::BF16 : ffi::F32)) {
      Fail(std::string(name) + " must have the type of the operand");
    }
  }

  int64_t num_local_experts() const {
    return error_.empty() ? spec_.virtual_ranks * spec_.experts_per_rank() : 0;
  }
  const CallSpec& spec() const { return spec_; }
  const std::string& error() const { return error_; }

 private:
  int64_t PerRank(const char* what, int64_t total) {
    if (!error_.empty()) return 0;
    if (total % spec_.virtual_ranks != 0) {
      Fail(std::to_string(total) + " " + what + " are not a multiple of virtual_ranks");
    }
    return total / spec_.virtual_ranks;
  }

  void Fail(const std::string& message) {
    if (error_.empty()) error_ = ToString(spec_) + ": " + message;
  }

  CallSpec spec_;
  std::string error_;
};

ffi::Future Join(CpuState* state, ffi::RunId run_id, const Where& where, SpecBuilder& builder,
                 DeviceBuffers buffers) {
  ffi::Promise promise;
  ffi::Future future(promise);
  builder.Expect("where", where, {2});
  if (!builder.error().empty()) {
    promise.SetError(ffi::Error::InvalidArgument(builder.error()));
    return future;
  }
  Arrival arrival;
  arrival.run_id = run_id.run_id;
  arrival.instance = where.typed_data()[0];
  arrival.device = where.typed_data()[1];
  arrival.spec = builder.spec();
  arrival.buffers = buffers;
  arrival.done = [promise](const Status& status) mutable {
    if (status.code == StatusCode::kOk) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(CodeOf(status.code), status.message));
    }
  };
  state->site.Join(std::move(arrival));
  return future;
}

ffi::ErrorOr<std::unique_ptr<CpuState>> Instantiate(Attributes) {
  return std::make_unique<CpuState>();
}

ffi::Future Plan(CpuState* state, ffi::RunId run_id, Where where, Ids expert_ids,
                 ffi::Result<Ids> valid_ids, ffi::Result<Ids> positions, ffi::Result<Ints> sources,
                 ffi::Result<Ints> group_sizes, ffi::Result<Ints> padded_group_sizes,
                 ffi::Result<Ints> dropped, ffi::Result<Ints> invalid, Attributes attributes) {
  SpecBuilder builder(OperationKind::kPlan, attributes);
  const int64_t num_tokens = expert_ids.dimensions()[0];
  const int64_t top_k = expert_ids.dimensions()[1];
  const int64_t num_local = builder.num_local_experts();
  builder.SetTokens(num_tokens, top_k);
  builder.SetCapacity(sources->dimensions()[0]);
  builder.Expect("expert_ids", *valid_ids, {num_tokens, top_k});
  builder.Expect("positions", *positions, {num_tokens, top_k});
  builder.Expect("group_sizes", *group_sizes, {num_local});
  builder.Expect("padded_group_sizes", *padded_group_sizes, {num_local});
  builder.Expect("dropped", *dropped, {num_local});
  builder.Expect("invalid", *invalid, {attributes.virtual_ranks});
  DeviceBuffers buffers;
  buffers.args = {expert_ids.untyped_data()};
  buffers.rets = {
      valid_ids->untyped_data(),   positions->untyped_data(),          sources->untyped_data(),
      group_sizes->untyped_data(), padded_group_sizes->untyped_data(), dropped->untyped_data(),
      invalid->untyped_data()};
  return Join(state, run_id, where, builder, buffers);
}

ffi::Future Dispatch(CpuState* state, ffi::RunId run_id, Where where, ffi::AnyBuffer x, Scales s,
                     Ints sources, Ints padded_group_sizes, ffi::Result<ffi::AnyBuffer> rows,
                     ffi::Result<RowScales> row_s, Attributes attributes) {
  SpecBuilder builder(OperationKind::kDispatch, attributes);
  const int64_t num_rows = sources.dimensions()[0];
  const int64_t num_local = builder.num_local_experts();
  builder.SetTokens(s.dimensions()[0], s.dimensions()[1]);
  builder.SetCapacity(num_rows);
  builder.SetPayload(x);
  builder.Expect("x", x, {s.dimensions()[0], builder.spec().hidden});
  builder.Expect("padded_group_sizes", padded_group_sizes, {num_local});
  builder.ExpectPayload("rows", *rows, {num_rows, builder.spec().hidden});
  builder.Expect("row_s", *row_s, {num_rows});
  DeviceBuffers buffers;
  buffers.args = {x.untyped_data(), s.untyped_data(), sources.untyped_data(),
                  padded_group_sizes.untyped_data()};
  buffers.rets = {rows->untyped_data(), row_s->untyped_data()};
  return Join(state, run_id, where, builder, buffers);
}

ffi::Future Combine(CpuState* state, ffi::RunId run_id, Where where, ffi::AnyBuffer rows,
                    RowScales row_s, Ids expert_ids, Ids positions, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Result<Scales> s, Attributes attributes) {
  SpecBuilder builder(OperationKind::kCombine, attributes);
  const int64_t num_tokens = expert_ids.dimensions()[0];
  const int64_t top_k = expert_ids.dimensions()[1];
  const int64_t num_rows = row_s.dimensions()[0];
  builder.SetTokens(num_tokens, top_k);
  builder.SetCapacity(num_rows);
  builder.SetPayload(rows);
  builder.Expect("rows", rows, {num_rows, builder.spec().hidden});
  builder.Expect("positions", positions, {num_tokens, top_k});
  builder.ExpectPayload("y", *y, {num_tokens, builder.spec().hidden});
  builder.Expect("s", *s, {num_tokens, top_k});
  DeviceBuffers buffers;
  buffers.args = {rows.untyped_data(), row_s.untyped_data(), expert_ids.untyped_data(),
                  positions.untyped_data()};
  buffers.rets = {y->untyped_data(), s->untyped_data()};
  return Join(state, run_id, where, builder, buffers);
}

}  // namespace

XLA_FFI_Error* CpuInstantiate(XLA_FFI_CallFrame* call_frame) {
  // XLA asks a handler for its state's type when it registers the handler. Registering the type
  // from Python does not do: what is queued before the client exists is given to it handlers first.
  static std::mutex mutex;
  {
    static constexpr XLA_FFI_TypeInfo kInfo = ffi::MakeTypeInfo<CpuState>();
    std::lock_guard lock(mutex);
    if (CpuState::id.type_id == 0) {
      XLA_FFI_Error* error =
          ffi::Ffi::RegisterTypeId(call_frame->api, "jax_moe_cpu_state", &CpuState::id, &kInfo);
      if (error != nullptr) return error;
    }
  }
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate, ffi::Ffi::BindInstantiate().Attrs<Attributes>());
  return (*handler)(call_frame);
}

XLA_FFI_Error* CpuPlan(XLA_FFI_CallFrame* call_frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Plan,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::State<CpuState>>()
                             .Ctx<ffi::RunId>()
                             .Arg<Where>()  // where i32[2]
                             .Arg<Ids>()    // expert_ids i32[V*T, K]
                             .Ret<Ids>()    // expert_ids i32[V*T, K]
                             .Ret<Ids>()    // positions i32[V*T, K]
                             .Ret<Ints>()   // sources i32[V*C]
                             .Ret<Ints>()   // group_sizes i32[V*E/R]
                             .Ret<Ints>()   // padded_group_sizes i32[V*E/R]
                             .Ret<Ints>()   // dropped i32[V*E/R]
                             .Ret<Ints>()   // invalid i32[V]
                             .Attrs<Attributes>());
  return (*handler)(call_frame);
}

XLA_FFI_Error* CpuDispatch(XLA_FFI_CallFrame* call_frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Dispatch,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::State<CpuState>>()
                             .Ctx<ffi::RunId>()
                             .Arg<Where>()           // where i32[2]
                             .Arg<ffi::AnyBuffer>()  // x f32|bf16[V*T, H]
                             .Arg<Scales>()          // s f32[V*T, K]
                             .Arg<Ints>()            // sources i32[V*C]
                             .Arg<Ints>()            // padded_group_sizes i32[V*E/R]
                             .Ret<ffi::AnyBuffer>()  // rows f32|bf16[V*C, H]
                             .Ret<RowScales>()       // row_s f32[V*C]
                             .Attrs<Attributes>());
  return (*handler)(call_frame);
}

XLA_FFI_Error* CpuCombine(XLA_FFI_CallFrame* call_frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Combine,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::State<CpuState>>()
                             .Ctx<ffi::RunId>()
                             .Arg<Where>()           // where i32[2]
                             .Arg<ffi::AnyBuffer>()  // rows f32|bf16[V*C, H]
                             .Arg<RowScales>()       // row_s f32[V*C]
                             .Arg<Ids>()             // expert_ids i32[V*T, K]
                             .Arg<Ids>()             // positions i32[V*T, K]
                             .Ret<ffi::AnyBuffer>()  // y f32|bf16[V*T, H]
                             .Ret<Scales>()          // s f32[V*T, K]
                             .Attrs<Attributes>());
  return (*handler)(call_frame);
}

}  // namespace jax_moe
