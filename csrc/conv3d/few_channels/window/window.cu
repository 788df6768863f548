// Statistics of convolutions of few channels whose kernel rows share gathered chunks.
#include "conv3d/few_channels/window/launch.cuh"

namespace kgopt {

Status run_conv_window(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return launch_window(p, n, stream);
}

}  // namespace kgopt
