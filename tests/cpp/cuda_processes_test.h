// Part of cuda_runtime_test: groups of two processes, which threads play.

#ifndef JAX_MOE_TESTS_CUDA_PROCESSES_TEST_H_
#define JAX_MOE_TESTS_CUDA_PROCESSES_TEST_H_

#include "fake_cuda.h"

namespace jax_moe::cuda {

void TestProcesses(FakeCudaSettings* settings, FakeCudaState* state);

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_TESTS_CUDA_PROCESSES_TEST_H_
