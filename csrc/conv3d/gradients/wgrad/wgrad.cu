// Launch of the weight gradient, its tensor maps, and the sum over what its blocks left.
#include "conv3d/gradients/wgrad/wgrad.h"

#include <algorithm>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/host/tensor_map.h"
#include "conv3d/gradients/wgrad/kernel.cuh"
#include "layout/split.cuh"

namespace kgopt {
namespace {

inline constexpr int kSumThreads = 512;

// Of a tile, where so many threads share an element's slots.
KGOPT_HD int sum_blocks(int tile_floats, int shares) {
  const int elements = kSumThreads / shares * 4;
  return (tile_floats + elements - 1) / elements;
}

// A thread has four elements. Shares are added in order: the order of summation depends on the plan alone.
template <int kSumShares>
__global__ void __launch_bounds__(kSumThreads) conv_wgrad_sum_kernel(const __grid_constant__ WgradSumParams p) {
  constexpr int kSumFours = kSumThreads / kSumShares;
  wait_for_prerequisites();
  __shared__ float4 shares[kSumShares][kSumFours];
  const WgradPlan& plan = p.plan;
  const int lane = threadIdx.x % kSumFours, share = threadIdx.x / kSumFours;
  const int tile_floats = wgrad_tile_floats(plan), columns = wgrad_columns(plan);
  const int blocks_per_job = sum_blocks(tile_floats, kSumShares);
  const int job = blockIdx.x / blocks_per_job;
  const int in_job = ((blockIdx.x - job * blocks_per_job) * kSumFours + lane) * 4;
  const float* from = p.partials + (int64_t(job) * plan.slots + share) * tile_floats + in_job;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int slot = in_job < tile_floats ? share : plan.slots; slot < plan.slots; slot += kSumShares) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    from += int64_t(kSumShares) * tile_floats;
  }
  shares[share][lane] = sum;
  __syncthreads();
  if (share > 0 || in_job >= tile_floats) return;
#pragma unroll
  for (int i = 1; i < kSumShares; ++i) {
    const float4 v = shares[i][lane];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  const int column0 = in_job % columns, a_in_tile = in_job / columns % kWgradChannels;
  const int tap = in_job / columns / kWgradChannels, taps_w = plan.few ? 1 : plan.taps[2];
  const int kh = tap / taps_w % plan.taps[1];
  const int kd = tap / taps_w / plan.taps[1] + job / plan.b_tiles / plan.a_tiles * kWgradGroups;
  const int a = job / plan.b_tiles % plan.a_tiles * kWgradChannels + a_in_tile;
  if (kd >= plan.taps[0] || a >= p.a) return;
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
  const int power = p.largest[0] ? split_exponent(*p.largest[0]) + split_exponent(*p.largest[1]) + p.shift : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = column0 + i;
    const int kw = plan.few ? column / plan.few : tap % taps_w;
    const int b = plan.few ? column % plan.few : job % plan.b_tiles * kWgradChannels + column;
    if (kw >= plan.taps[2] || b >= p.b) continue;
    const int64_t at = a * p.stride_a + b * p.stride_b + kd * p.stride_k[0] + kh * p.stride_k[1] + kw * p.stride_k[2];
    switch (p.dtype) {
      case Dtype::kFloat32: {
        float* const to = static_cast<float*>(p.dw) + at;
        float value = power == 0 ? v[i] : ldexpf(v[i], -power);
        if (p.inverse[0]) value = static_cast<float>(value * (p.inverse[0][a] * p.inverse[1][b]));
        *to = p.adds ? *to + value : value;
        break;
      }
      case Dtype::kBFloat16: static_cast<__nv_bfloat16*>(p.dw)[at] = __float2bfloat16(v[i]); break;
      default: static_cast<__half*>(p.dw)[at] = __float2half(v[i]);
    }
  }
}

// In boxes of kWgradChannels x box_w x box_h, or of row_numbers elements of dense rows of few channels.
Status encode(uint64_t (&map)[16], const WgradTensor& t, ConvMath math, int box_w, int box_h, int row_numbers) {
  const bool tf32 = math == ConvMath::kTf32, few = row_numbers > 0;
  const cuuint64_t size = tf32 ? 4 : 2;
  const cuuint64_t sizes[5] = {cuuint64_t(t.c), cuuint64_t(t.size[2]), cuuint64_t(t.size[1]), cuuint64_t(t.size[0]),
                               cuuint64_t(t.n)};
  // A dim of size 1 may have any stride, which the map would refuse.
  cuuint64_t strides[4] = {cuuint64_t(t.stride[2]), cuuint64_t(t.stride[1]), cuuint64_t(t.stride[0]),
                           cuuint64_t(t.stride_n)};
  for (int i = 0; i < 4; ++i) strides[i] = sizes[i + 1] == 1 ? 16 : strides[i] * size;
  const cuuint32_t box[5] = {kWgradChannels, cuuint32_t(box_w), cuuint32_t(box_h), 1, 1};
  TensorMapSpec spec{};
  // TFLOAT32 rounds to nearest; the tensor cores would truncate.
  spec.type = tf32                      ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
              : math == ConvMath::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  spec.rank = few ? 4 : 5;
  spec.data = t.data;
  std::copy(sizes + few, sizes + 5, spec.sizes);
  std::copy(strides + few, strides + 4, spec.strides);
  if (few) {
    spec.sizes[0] = sizes[0] * sizes[1];
    spec.box[0] = row_numbers;
    std::fill(spec.box + 1, spec.box + 4, 1);
    spec.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  } else {
    std::copy(box, box + 5, spec.box);
    spec.swizzle = tf32 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  }
  return encode_tensor_map("conv_wgrad_kernel", spec, map);
}

template <ConvMath kMath, int kRows, int kStride>
Status launch_wgrad(const WgradParams& p, cudaStream_t stream) {
  const char* const name = "conv_wgrad_kernel";
  const int blocks = wgrad_blocks(p.plan), smem = p.plan.smem_bytes;
  if (p.plan.few) {
    return launch_kernel<conv_wgrad_kernel<kMath, kRows, 3, 3, kStride, true>>(name, p, blocks, kWgradThreads, smem,
                                                                               stream);
  }
  return launch_kernel<conv_wgrad_kernel<kMath, kRows, 3, 3, kStride, false>>(name, p, blocks, kWgradThreads, smem,
                                                                              stream);
}
template <ConvMath kMath>
Status launch_rows(const WgradParams& p, cudaStream_t stream) {
  if (p.plan.stride == 2) {
    return p.plan.rows == 8 ? launch_wgrad<kMath, 8, 2>(p, stream) : launch_wgrad<kMath, 4, 2>(p, stream);
  }
  return p.plan.rows == 8 ? launch_wgrad<kMath, 8, 1>(p, stream) : launch_wgrad<kMath, 4, 1>(p, stream);
}

}  // namespace

Status set_wgrad_tensors(WgradParams* p, const WgradTensor& still, const WgradTensor& moved) {
  const WgradPlan& plan = p->plan;
  for (int i = 0; i < 3; ++i) {
    p->still[i] = static_cast<int>(still.size[i]);
    p->moved[i] = static_cast<int>(moved.size[i]);
  }
  Status status = encode(p->still_map, still, plan.math, plan.width, plan.rows, 0);
  if (!status.ok()) return status;
  WgradTensor pairs = moved;
  if (plan.stride == 2 && !plan.few) {
    pairs.c = moved.stride[2] + moved.c;
    pairs.size[2] = moved.size[2] / 2;
    pairs.stride[2] = 2 * moved.stride[2];
    status = encode(p->second_map, pairs, plan.math, plan.width, 1, 0);
    if (!status.ok()) return status;
  }
  p->moved_stride_w = static_cast<int>(moved.stride[2]);
  return encode(p->moved_map, pairs, plan.math, wgrad_first_run(plan), 1, plan.row_numbers);
}

Status run_conv_wgrad(const WgradParams& p, cudaStream_t stream) {
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_rows<ConvMath::kTf32>(p, stream);
    case ConvMath::kBf16: return launch_rows<ConvMath::kBf16>(p, stream);
    default: return launch_rows<ConvMath::kFp16>(p, stream);
  }
}

Status run_conv_wgrad_sum(const WgradSumParams& p, cudaStream_t stream) {
  const char* const name = "conv_wgrad_sum_kernel";
  const int tile_floats = wgrad_tile_floats(p.plan);
  const int64_t jobs = p.plan.partial_floats / p.plan.slots / tile_floats;
  const auto blocks = [&](int shares) { return static_cast<unsigned>(jobs * sum_blocks(tile_floats, shares)); };
  if (p.plan.slots >= 16) {
    return launch_after<conv_wgrad_sum_kernel<16>>(true, name, blocks(16), kSumThreads, stream, p);
  }
  if (p.plan.slots >= 4) {
    return launch_after<conv_wgrad_sum_kernel<4>>(true, name, blocks(4), kSumThreads, stream, p);
  }
  return launch_after<conv_wgrad_sum_kernel<1>>(true, name, blocks(1), kSumThreads, stream, p);
}

}  // namespace kgopt
