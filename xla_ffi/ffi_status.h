// The FFI's name for each kind of error.

#ifndef JAX_MOE_FFI_STATUS_H_
#define JAX_MOE_FFI_STATUS_H_

#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe {

inline xla::ffi::ErrorCode CodeOf(StatusCode code) {
  using xla::ffi::ErrorCode;
  switch (code) {
    case StatusCode::kOk:
      return ErrorCode::kOk;
    case StatusCode::kInvalidArgument:
      return ErrorCode::kInvalidArgument;
    case StatusCode::kDeadlineExceeded:
      return ErrorCode::kDeadlineExceeded;
    case StatusCode::kFailedPrecondition:
      return ErrorCode::kFailedPrecondition;
    case StatusCode::kResourceExhausted:
      return ErrorCode::kResourceExhausted;
    case StatusCode::kUnimplemented:
      return ErrorCode::kUnimplemented;
    case StatusCode::kInternal:
      return ErrorCode::kInternal;
  }
  return ErrorCode::kUnknown;
}

}  // namespace jax_moe

#endif  // JAX_MOE_FFI_STATUS_H_
