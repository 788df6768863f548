// A 1 x 1 convolution to a few channels, of a tensor that is normalized and activated as it is read: one read of x and
// next to no writes, where a norm of its own would write and a convolution read everything once more.
//
// channels_last only. Neighbouring lanes hold the channels of a position, a vector each, and add up what their channels
// give; no product here is worth a tensor core.
#include "common/device/dtype.cuh"
#include "common/device/floor.cuh"
#include "common/host/launch.h"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr int kThreads = kNormConv1x1Threads, kUnroll = kNormConv1x1Unroll;

template <typename T, int kOut, bool kNorm, Chain kAct>
__global__ void __launch_bounds__(kThreads, 6) norm_conv1x1_kernel(const __grid_constant__ NormConv1x1Params p) {
  constexpr int kSize = kVecSize<T>;
  const int lanes = p.c / kSize;  // a power of 2, at most 32
  const int lane = threadIdx.x % lanes, channel = lane * kSize;
  const int64_t n = blockIdx.x / p.blocks_per_sample;
  float mean[kSize], scale[kSize], shift[kSize], weight[kOut][kSize], bias[kOut];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (kNorm) {
      const float4 k = static_cast<const float4*>(p.table)[n * p.c + channel + i];  // mean, rstd, weight, bias
      mean[i] = k.x, scale[i] = k.y * k.z, shift[i] = k.w;
    }
#pragma unroll
    for (int k = 0; k < kOut; ++k) {
      weight[k][i] = to_acc(static_cast<const T*>(p.weight)[int64_t(k) * p.c + channel + i]);
    }
  }
#pragma unroll
  for (int k = 0; k < kOut; ++k) bias[k] = p.bias ? to_acc(static_cast<const T*>(p.bias)[k]) : 0.f;
  const T* const x = static_cast<const T*>(p.x) + n * p.s * p.c + channel;
  T* const y = static_cast<T*>(p.y) + n * p.s * kOut;
  const int64_t step = int64_t(p.blocks_per_sample) * (kThreads / lanes) * kUnroll;
  int64_t at = (int64_t(blockIdx.x - n * p.blocks_per_sample) * (kThreads / lanes) + threadIdx.x / lanes) * kUnroll;
  auto store = [&](int64_t position, const float (&sum)[kOut]) {
    if (position >= p.s) return;
#pragma unroll
    for (int k = 0; k < kOut; ++k) y[position * kOut + k] = from_acc<T>(sum[k] + bias[k]);
  };
  // All lanes of a warp come round equally often, since they exchange sums.
  for (int64_t round = (p.s + step - 1) / step; round > 0; --round, at += step) {
    Vec<T, kSize> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_vec<T, kSize>(x + min(at + u, p.s - 1) * p.c);
    float sum[kUnroll][kOut] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float z[kSize];
      unpack(v[u], z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if constexpr (kNorm) z[i] = (z[i] - mean[i]) * scale[i] + shift[i];
      }
      apply_chain<kAct, kIsCoarse<T>>(floored(p.act), z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
#pragma unroll
        for (int k = 0; k < kOut; ++k) sum[u][k] += z[i] * weight[k][i];
      }
    }
    if (lanes < kUnroll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int k = 0; k < kOut; ++k) {
          if (lanes == 2) sum[u][k] += __shfl_xor_sync(0xffffffff, sum[u][k], 1);
        }
        if (lane == 0) store(at + u, sum[u]);
      }
      continue;
    }
    // Each of the first steps sends the sums of half of the positions to the other half of the lanes.
    float two[2][kOut], one[kOut];
#pragma unroll
    for (int k = 0; k < kOut; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float even = sum[2 * j][k], odd = sum[2 * j + 1][k];
        two[j][k] = (lane & 1 ? odd : even) + __shfl_xor_sync(0xffffffff, lane & 1 ? even : odd, 1);
      }
      one[k] = (lane & 2 ? two[1][k] : two[0][k]) + __shfl_xor_sync(0xffffffff, lane & 2 ? two[0][k] : two[1][k], 2);
    }
    for (int mask = 4; mask < lanes; mask *= 2) {
#pragma unroll
      for (int k = 0; k < kOut; ++k) one[k] += __shfl_xor_sync(0xffffffff, one[k], mask);
    }
    if (lane < kUnroll) store(at + lane, one);
  }
}

template <typename T, int kOut, bool kNorm, Chain kAct>
Status launch(NormConv1x1Params p, cudaStream_t stream) {
  p.blocks_per_sample = norm_conv1x1_blocks(p);
  const int64_t blocks = p.n * p.blocks_per_sample;
  if (blocks > 0x7fffffff) return Status::Unsupported("norm_conv1x1_kernel", "too many samples");
  return launch_kernel<&norm_conv1x1_kernel<T, kOut, kNorm, kAct>>("norm_conv1x1_kernel", p,
                                                                   static_cast<unsigned>(blocks), kThreads, 0, stream);
}

template <typename T, int kOut>
Status launch_chain(const NormConv1x1Params& p, cudaStream_t stream) {
  const Chain act = chain_kind(p.act);
  if (!p.table) return launch<T, kOut, false, Chain::kNone>(p, stream);
  return act == Chain::kNone || act == Chain::kRelu ? launch<T, kOut, true, Chain::kRelu>(p, stream)
                                                    : launch<T, kOut, true, Chain::kAny>(p, stream);
}

template <typename T>
Status launch_out(const NormConv1x1Params& p, cudaStream_t stream) {
  switch (p.c_out) {
    case 1: return launch_chain<T, 1>(p, stream);
    case 2: return launch_chain<T, 2>(p, stream);
    case 3: return launch_chain<T, 3>(p, stream);
    case 4: return launch_chain<T, 4>(p, stream);
    default: return Status::Unsupported("norm_conv1x1_kernel", "more than 4 output channels");
  }
}

}  // namespace

Status run_norm_conv1x1(const NormConv1x1Params& p, cudaStream_t stream) {
  if (p.n * p.s == 0) return Status::Ok();
  if (const char* why = norm_conv1x1_refusal(p)) return Status::Unsupported("norm_conv1x1_kernel", why);
  switch (p.dtype) {
    case Dtype::kFloat32: return launch_out<float>(p, stream);
    case Dtype::kBFloat16: return launch_out<__nv_bfloat16>(p, stream);
    case Dtype::kFloat16: return launch_out<__half>(p, stream);
    default: return Status::Unsupported("norm_conv1x1_kernel", "float64");
  }
}

}  // namespace kgopt
