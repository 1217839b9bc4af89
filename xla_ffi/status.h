// What went wrong, and of which kind. Free of FFI types.

#ifndef JAX_MOE_STATUS_H_
#define JAX_MOE_STATUS_H_

#include <cstdint>
#include <string>

namespace jax_moe {

enum class StatusCode : uint8_t {
  kOk,
  kInvalidArgument,
  kDeadlineExceeded,
  kFailedPrecondition,
  kResourceExhausted,
  kUnimplemented,
  kInternal,
};

struct Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
};

}  // namespace jax_moe

#endif  // JAX_MOE_STATUS_H_
