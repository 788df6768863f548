// Norms over channels: see channel_norm/kernel.cuh.
#include <algorithm>
#include <limits>

#include "channel_norm/channel_norm.h"
#include "channel_norm/kernel.cuh"

namespace kgopt {
namespace {

template <typename T, int kVec, Chain kChain>
__global__ void __launch_bounds__(256, 3) channel_norm_planes_kernel(const __grid_constant__ ChannelNormParams p) {
  using Acc = acc_t<T>;
  extern __shared__ __align__(16) unsigned char raw[];
  Acc* const shared = reinterpret_cast<Acc*>(raw + p.ring_bytes);
  const ChannelAffine<Acc> affine(p, shared);
  Acc* const scratch = ChannelAffine<Acc>::behind(p, shared);
  const T* const x = static_cast<const T*>(p.x);
  T* const y = static_cast<T*>(p.y);
  PlanesThread<T, kVec, kPlanesHeld> own(p), following(p);
  Ring<T, kVec> ring(raw, p.held);
  following.move_to(blockIdx.x);
  following.fetch(x, ring);
  cp_async_commit();
  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    own.live = following.live;
    own.base = following.base;
    ring.turn();
    if (tile + gridDim.x < p.tiles) {
      following.move_to(tile + gridDim.x);
      following.fetch(x, ring);
    }
    cp_async_commit();
    asm volatile("cp.async.wait_group 1;" ::: "memory");  // all but the next tile's
    PositionScale<Acc> scale[kVec];
    own.scales(x, ring, scratch, scale);
    own.for_each(x, ring, [&](int64_t c, Acc(&v)[kVec]) {
      const Acc weight = affine.weight(c), bias = affine.bias(c);
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[j] = (v[j] - scale[j].mean) * scale[j].scale * weight + bias;
      store_result<T, kVec>(y + own.base + c * p.s, finish_position<T, kChain>(p, v));
    });
  }
}

template <typename T, int kVec, Chain kChain>
__global__ void __launch_bounds__(256, 3) channel_norm_pixels_kernel(const __grid_constant__ ChannelNormParams p) {
  using Acc = acc_t<T>;
  extern __shared__ __align__(16) unsigned char raw[];
  const ChannelAffine<Acc> affine(p, reinterpret_cast<Acc*>(raw));
  const T* const x = static_cast<const T*>(p.x);
  T* const y = static_cast<T*>(p.y);
  PixelLane<T, kVec, kPixelsHeld> own(p);
  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    own.move_to(tile);
    Vec<T, kVec> held[kPixelsHeld];
    own.load_held(x, held);
    const PositionScale<Acc> scale = own.scale(x, held);
    own.for_each(x, held, [&](int64_t c, Acc(&v)[kVec]) {
      Acc weight[kVec], bias[kVec];
      affine.load(affine.weights + c, weight);
      affine.load(affine.biases + c, bias);
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[j] = (v[j] - scale.mean) * scale.scale * weight[j] + bias[j];
      store_result<T, kVec>(y + own.base + c, finish_position<T, kChain>(p, v));
    });
  }
}

template <typename Acc>
__global__ void __launch_bounds__(256) channel_norm_table_kernel(const __grid_constant__ ChannelNormParams p) {
  fill_affine_table(p, static_cast<Acc*>(p.table), int64_t(blockIdx.x) * 256 + threadIdx.x, int64_t(gridDim.x) * 256);
}

}  // namespace

Status run_channel_norm_table(const ChannelNormParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((p.c + 255) / 256, 1024)));
  if (p.dtype == Dtype::kFloat64) {
    return launch_kernel<&channel_norm_table_kernel<double>>("channel_norm_table_kernel", p, grid, 256, 0, stream);
  }
  return launch_kernel<&channel_norm_table_kernel<float>>("channel_norm_table_kernel", p, grid, 256, 0, stream);
}

Status run_channel_norm(ChannelNormParams p, const ChannelNormPlan& plan, cudaStream_t stream) {
  if (p.n * p.c * p.s == 0) return Status::Ok();
  p.along = plan.along;
  p.tiles = plan.tiles;
  p.held = plan.held;
  p.ring_bytes = plan.ring_bytes;
  p.floor = p.act.empty() ? -std::numeric_limits<double>::infinity() : 0;
  const dim3 grid(static_cast<unsigned>(plan.blocks));
  Status status;
  KGOPT_DISPATCH_CHANNEL_NORM(p, plan, true, T, kVec, kChain, {
    status = p.channels_last ? launch_kernel<&channel_norm_pixels_kernel<T, kVec, kChain>>(
                                   "channel_norm_pixels_kernel", p, grid, plan.threads, plan.smem_bytes, stream)
                             : launch_kernel<&channel_norm_planes_kernel<T, kVec, kChain>>(
                                   "channel_norm_planes_kernel", p, grid, plan.threads, plan.smem_bytes, stream);
  });
  return status;
}

}  // namespace kgopt
