// The FFI handlers of the CPU custom calls.

#ifndef JAX_MOE_CPU_HANDLERS_H_
#define JAX_MOE_CPU_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe {

XLA_FFI_Error* CpuInstantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CpuPlan(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CpuDispatch(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CpuCombine(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_moe

#endif  // JAX_MOE_CPU_HANDLERS_H_
