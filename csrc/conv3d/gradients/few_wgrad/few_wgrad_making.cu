// The weight gradient of a dy that is made from x.
#include "conv3d/gradients/few_wgrad/launch.cuh"

namespace kgopt {

Status launch_conv_few_wgrad_making(const FewWgradParams& p, cudaStream_t stream) {
  return launch_few_wgrad_math<true>(p, stream);
}

}  // namespace kgopt
