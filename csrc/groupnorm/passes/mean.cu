// Normalize and accumulate the mean, without normalizing anything: the mean over a channel of an affine function is
// that function of the channel's mean, so out[n] needs the channel means and the group statistics alone.
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/groupnorm.h"

namespace kgopt {
namespace {

template <typename Acc>
__global__ void __launch_bounds__(128) group_norm_mean_kernel(const __grid_constant__ GroupNormMeanParams p) {
  __shared__ Acc shared[4];
  const int64_t n = blockIdx.x;
  const int64_t channels = p.c / p.g;
  Acc sum = 0;
  wait_for_prerequisites();
  for (int64_t c = threadIdx.x; c < p.c; c += blockDim.x) {
    const int64_t g = n * p.g + c / channels;
    const Acc weight = p.weight ? load_as<Acc>(p.weight, c, p.affine_dtype) : Acc(1);
    const Acc bias = p.bias ? load_as<Acc>(p.bias, c, p.affine_dtype) : Acc(0);
    const Acc centered = static_cast<const Acc*>(p.channel_mean)[n * p.c + c] - static_cast<const Acc*>(p.mean)[g];
    sum += centered * static_cast<const Acc*>(p.rstd)[g] * weight + bias;
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) store_as<Acc>(p.out, n, p.out_dtype, sum / Acc(p.c));
}

}  // namespace

Status run_group_norm_mean(const GroupNormMeanParams& p, cudaStream_t stream) {
  if (p.n == 0) return Status::Ok();
  const unsigned blocks = static_cast<unsigned>(p.n);
  const char* const name = "group_norm_mean_kernel";
  return p.is_double ? launch_after<group_norm_mean_kernel<double>>(true, name, blocks, 128, stream, p)
                     : launch_after<group_norm_mean_kernel<float>>(true, name, blocks, 128, stream, p);
}

}  // namespace kgopt
