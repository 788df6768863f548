// Statistics of a narrow convolution's output from the Gram matrix of its unfolded input.
#include "conv3d_gram_launch.cuh"

namespace kgopt {

Status run_conv_gram_stats(const GramParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  switch (p.dtype) {
    case Dtype::kFloat32: return launch_gram<float>(p, n, stream);
    case Dtype::kBFloat16: return launch_gram<__nv_bfloat16>(p, n, stream);
    case Dtype::kFloat16: return launch_gram<__half>(p, n, stream);
    default: return Status::Unsupported("conv_gram_kernel", "this dtype");
  }
}

}  // namespace kgopt
