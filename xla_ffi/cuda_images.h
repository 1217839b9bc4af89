// The kernels that the build embeds (embed_kernels.cmake writes the definition).

#ifndef JAX_MOE_CUDA_IMAGES_H_
#define JAX_MOE_CUDA_IMAGES_H_

#include <cstddef>

namespace jax_moe::cuda {

constexpr int kNumKernels = 3;

// plan, dispatch and combine, in this order.
struct KernelImage {
  const char* entry;           // name of the kernel
  const char* ptx;             // preprocessed text, ends in NUL; for the driver's compiler
  const unsigned char* cubin;  // for sm_90; null where the build found no ptxas
  size_t cubin_bytes;
};
extern const KernelImage kKernelImages[kNumKernels];

}  // namespace jax_moe::cuda

#endif  // JAX_MOE_CUDA_IMAGES_H_
