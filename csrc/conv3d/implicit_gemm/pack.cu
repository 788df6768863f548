// Packs weights into mma fragment order, one 32-bit word a thread: [class][group][n tile][chunk][k step][column block]
// [hi, lo][lane][2]. Rounding to TF32 (or splitting for 3xTF32) happens here, once, instead of in every block.
#include "common/device/mma.cuh"
#include "common/host/launch.h"
#include "conv3d/implicit_gemm/implicit_gemm.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {
namespace {

template <typename T>
__device__ float load_float(const void* p, int64_t i) {
  return static_cast<float>(static_cast<const T*>(p)[i]);
}

__device__ float load_as_float(const void* p, int64_t i, Dtype dtype) {
  switch (dtype) {
    case Dtype::kBFloat16: return load_float<__nv_bfloat16>(p, i);
    case Dtype::kFloat16: return load_float<__half>(p, i);
    default: return load_float<float>(p, i);
  }
}

__device__ uint32_t half_bits(const void* p, int64_t i) { return static_cast<const unsigned short*>(p)[i]; }

__global__ void __launch_bounds__(256) conv_pack_kernel(const __grid_constant__ ImplicitGemmPackParams p) {
  const ImplicitGemmPlan& plan = p.plan;
  const int split = plan.math == ConvMath::kTf32x3 ? 2 : 1;
  const int per_word = plan.math == ConvMath::kBf16 || plan.math == ConvMath::kFp16 ? 2 : 1;
  const int cls = blockIdx.y;
  const ConvDimClass dim_w = plan.dim[2][cls % plan.classes[2]];
  const ConvDimClass dim_h = plan.dim[1][(cls / plan.classes[2]) % plan.classes[1]];
  const ConvDimClass dim_d = plan.dim[0][cls / (plan.classes[2] * plan.classes[1])];
  const int taps = dim_d.taps * dim_h.taps * dim_w.taps;
  const int k_words = taps * plan.words;

  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < plan.packed_class_words;
       index += int64_t(gridDim.x) * blockDim.x) {
    int64_t rest = index;
    const int half = rest & 1;
    rest >>= 1;
    const int lane = rest & 31;
    rest >>= 5;
    const int low = rest % split;
    rest /= split;
    const int nb = rest % plan.nb;
    rest /= plan.nb;
    const int ks = rest % plan.k_steps_max;
    rest /= plan.k_steps_max;
    const int chunk = rest % plan.chunks;
    rest /= plan.chunks;
    const int n_tile = rest % plan.n_tiles;
    const int group = rest / plan.n_tiles;

    const int k = ks * 8 + (lane & 3) + 4 * half;
    const int co = (n_tile * plan.nb + nb) * 8 + (lane >> 2);
    uint32_t word = 0;
    if (k < k_words && co < p.c_out) {
      const int channel_word = plan.taps_fast ? k / taps : k % plan.words;
      const int tap = plan.taps_fast ? k % taps : k / plan.words;
      const int kw = dim_w.k0 + (tap % dim_w.taps) * dim_w.k_step;
      const int kh = dim_h.k0 + (tap / dim_w.taps % dim_h.taps) * dim_h.k_step;
      const int kd = dim_d.k0 + (tap / (dim_w.taps * dim_h.taps)) * dim_d.k_step;
      const int ci = (chunk * plan.words + channel_word) * per_word;
      const int64_t at = group * p.stride_group + co * p.stride_out + ci * p.stride_in + kd * p.stride_k[0] +
                         kh * p.stride_k[1] + kw * p.stride_k[2];
      if (ci < p.c_in) {
        if (per_word == 2) {
          word = half_bits(p.weight, at);
          if (ci + 1 < p.c_in) word |= half_bits(p.weight, at + p.stride_in) << 16;
        } else {
          const float value = load_float<float>(p.weight, at);
          if (split == 2) {
            uint32_t hi, lo;
            split_tf32(value, &hi, &lo);
            word = low ? lo : hi;
          } else {
            word = to_tf32(value);
          }
        }
      }
    }
    p.packed[cls * plan.packed_class_words + index] = word;
  }

  const int columns = plan.n_tiles * plan.nb * 8;
  if (cls == 0) {
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < int64_t(p.groups) * columns;
         i += int64_t(gridDim.x) * blockDim.x) {
      const int co = i % columns;
      const int64_t group = i / columns;
      p.packed_bias[i] = p.bias && co < p.c_out ? load_as_float(p.bias, group * p.c_out + co, p.dtype) : 0.f;
    }
  }
}

}  // namespace

Status run_conv_pack(const ImplicitGemmPackParams& p, cudaStream_t stream) {
  const int classes = p.plan.classes[0] * p.plan.classes[1] * p.plan.classes[2];
  const int64_t blocks = (p.plan.packed_class_words + 255) / 256;
  const dim3 grid(static_cast<unsigned>(blocks < 1 ? 1 : (blocks < 4096 ? blocks : 4096)), classes);
  return launch_kernel<&conv_pack_kernel>("conv_pack_kernel", p, grid, 256, 0, stream);
}

}  // namespace kgopt
