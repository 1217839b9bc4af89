// Python's view of the CUDA runtime.

#ifndef JAX_MOE_CUDA_BINDING_H_
#define JAX_MOE_CUDA_BINDING_H_

#include <nanobind/nanobind.h>

namespace jax_moe {

void DefineCuda(nanobind::module_& module);

}  // namespace jax_moe

#endif  // JAX_MOE_CUDA_BINDING_H_
