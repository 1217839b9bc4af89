// The FFI handlers of platform CUDA: they read sizes and pointers off the call and launch.

#ifndef JAX_MOE_CUDA_HANDLERS_H_
#define JAX_MOE_CUDA_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe {

// With the command-buffer trait: XLA may capture them into CUDA graphs.
XLA_FFI_Error* CudaPlan(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatch(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombine(XLA_FFI_CallFrame* call_frame);

// The same without it.
XLA_FFI_Error* CudaPlanUncaptured(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatchUncaptured(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombineUncaptured(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_moe

#endif  // JAX_MOE_CUDA_HANDLERS_H_
