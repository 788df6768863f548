// Backward of norms over channels: see channel_norm/kernel.cuh. With z = xhat * weight + bias, dz = dy * act'(z) and
// g = dz * weight, dx = scale * (g - mean(g) - xhat * mean(g * xhat)), where `layer` alone has the first mean, and l2
// not the second for what is not longer than eps. Statistics are computed again. Each row of the partial sums has one
// owner, which adds in the order of its tiles; those of channels that are not held lie in memory all the while.
#include "channel_norm/channel_norm.h"
#include "channel_norm/kernel.cuh"

namespace kgopt {
namespace {

// dz of a vector, in dy's place; v becomes xhat.
template <typename T, Chain kChain, int kVec, typename WeightOf, typename BiasOf, typename ScaleOf>
__device__ __forceinline__ void make_dz(const ChannelNormParams& p, const WeightOf& weight, const BiasOf& bias,
                                        const ScaleOf& scale, acc_t<T> (&v)[kVec], acc_t<T> (&dy)[kVec]) {
  acc_t<T> z[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    v[j] = (v[j] - scale(j).mean) * scale(j).scale;
    z[j] = v[j] * weight(j) + bias(j);
  }
  multiply_slopes<kChain, kIsCoarse<T>>(p.act, z, dy);
}

template <typename T, int kVec, Chain kChain>
__global__ void __launch_bounds__(256) channel_norm_planes_bwd_kernel(const __grid_constant__ ChannelNormParams p) {
  using Acc = acc_t<T>;
  constexpr int kHeld = kPlanesHeldBackward;
  extern __shared__ __align__(16) unsigned char raw[];
  Acc* const shared = reinterpret_cast<Acc*>(raw);
  const ChannelAffine<Acc> affine(p, shared);
  Acc* const scratch = ChannelAffine<Acc>::behind(p, shared);
  const T* const x = static_cast<const T*>(p.x);
  const T* const dy = static_cast<const T*>(p.dy);
  T* const dx = static_cast<T*>(p.y);
  PlanesThread<T, kVec, kHeld> own(p);
  // A warp, or where a channel has several of them each, has a row.
  const int column = threadIdx.x % own.along, lanes = min(own.along, 32);
  const int64_t row = int64_t(blockIdx.x) * max(1, own.along / 32) + column / 32;
  Acc* const row_x = static_cast<Acc*>(p.sums) + row * p.c;
  Acc* const row_1 = row_x + p.rows * p.c;
  Acc sum_x[kHeld] = {}, sum_1[kHeld] = {};
  const Acc inverse = reciprocal_of_count(static_cast<Acc>(p.c));

  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    own.move_to(tile);
    Vec<T, kVec> held[kHeld], held_dy[kHeld];
    own.load_held(x, held);
    own.load_held(dy, held_dy);
    PositionScale<Acc> scale[kVec];
    own.scales(x, held, scratch, scale);
    const auto scale_of = [&](int j) { return scale[j]; };
    Acc dots[2][kVec] = {};  // of g, and of g * xhat
    Acc dz[kHeld][kVec];
    const auto visit = [&](int64_t c, Acc(&v)[kVec], Acc(&d)[kVec], Acc* to_x, Acc* to_1) {
      const Acc weight = affine.weight(c), bias = affine.bias(c);
      make_dz<T, kChain, kVec>(p, [&](int) { return weight; }, [&](int) { return bias; }, scale_of, v, d);
      Acc in_x = 0, in_1 = 0;  // the vector's first: fewer terms follow each other
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        in_x += d[j] * v[j];
        in_1 += d[j];
        const Acc g = d[j] * weight;
        dots[0][j] += g;
        dots[1][j] += g * v[j];
      }
      *to_x += in_x;
      *to_1 += in_1;
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) dz[k][j] = 0;
      if (!own.has(own.held_channel(k))) continue;
      Acc v[kVec];
      unpack(held[k], v);
      unpack(held_dy[k], dz[k]);
      visit(own.held_channel(k), v, dz[k], &sum_x[k], &sum_1[k]);
    }
    const auto again = [&](int64_t c, Acc(&v)[kVec], Acc(&d)[kVec]) {
      unpack(load_vec<T, kVec>(x + own.base + c * p.s), v);
      unpack(load_vec<T, kVec>(dy + own.base + c * p.s), d);
    };
    // All threads of a channel stay together, those behind the end of the rows too: they share a sum.
#pragma unroll 1
    for (int64_t round = kHeld; round * own.deep < p.c; ++round) {
      const int64_t c = own.first + round * own.deep;
      Acc v[kVec], d[kVec], to_x = 0, to_1 = 0;
      if (own.has(c)) {
        again(c, v, d);
        visit(c, v, d, &to_x, &to_1);
      }
      to_x = sum_over_lanes(to_x, lanes);
      to_1 = sum_over_lanes(to_1, lanes);
      if (column % 32 == 0 && c < p.c) {
        row_x[c] = (tile == blockIdx.x ? Acc(0) : row_x[c]) + to_x;
        row_1[c] = (tile == blockIdx.x ? Acc(0) : row_1[c]) + to_1;
      }
    }
    const int positions = kVec * own.along, at = threadIdx.x % own.along;
    sum_over_block(dots, own.along, scratch, [&](int i, const Acc(&of)[2]) {
      scratch[i] = p.kind == ChannelNormKind::kLayer ? of[0] * inverse : Acc(0);
      scratch[positions + i] = of[1] * inverse;
    });
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      dots[0][j] = scratch[j * own.along + at];
      dots[1][j] = scale[j].turns ? scratch[positions + j * own.along + at] : Acc(0);
    }
    const auto store = [&](int64_t c, Acc(&v)[kVec], const Acc(&d)[kVec]) {
      const Acc weight = affine.weight(c);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Acc xhat = (v[j] - scale[j].mean) * scale[j].scale;
        v[j] = scale[j].scale * (rounded_product(d[j], weight) - dots[0][j] - xhat * dots[1][j]);
      }
      store_result<T, kVec>(dx + own.base + c * p.s, pack<T, kVec>(v));
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (!own.has(own.held_channel(k))) continue;
      Acc v[kVec];
      unpack(held[k], v);
      store(own.held_channel(k), v, dz[k]);
    }
#pragma unroll 1
    for (int64_t c = own.held_channel(kHeld); own.has(c); c += own.deep) {
      Acc v[kVec], d[kVec], xhat[kVec];
      again(c, v, d);
#pragma unroll
      for (int j = 0; j < kVec; ++j) xhat[j] = v[j];
      const Acc weight = affine.weight(c), bias = affine.bias(c);
      make_dz<T, kChain, kVec>(p, [&](int) { return weight; }, [&](int) { return bias; }, scale_of, xhat, d);
      store(c, v, d);
    }
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const Acc to_x = sum_over_lanes(sum_x[k], lanes), to_1 = sum_over_lanes(sum_1[k], lanes);
    if (column % 32 == 0 && own.held_channel(k) < p.c) {
      row_x[own.held_channel(k)] = to_x;
      row_1[own.held_channel(k)] = to_1;
    }
  }
}

template <typename T, int kVec, Chain kChain>
__global__ void __launch_bounds__(128, kChain == Chain::kAny ? 2 : 3)
    channel_norm_pixels_bwd_kernel(const __grid_constant__ ChannelNormParams p) {
  using Acc = acc_t<T>;
  constexpr int kHeld = kVec == 8 ? kPixelsHeldOfEight : kPixelsHeld;
  extern __shared__ __align__(16) unsigned char raw[];
  const ChannelAffine<Acc> affine(p, reinterpret_cast<Acc*>(raw));
  const T* const x = static_cast<const T*>(p.x);
  const T* const dy = static_cast<const T*>(p.dy);
  T* const dx = static_cast<T*>(p.y);
  PixelLane<T, kVec, kHeld> own(p);
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  Acc* const row_x = static_cast<Acc*>(p.sums) + row * p.c;
  Acc* const row_1 = row_x + p.rows * p.c;
  Acc sum_x[kHeld][kVec] = {}, sum_1[kHeld][kVec] = {};
  const Acc inverse = reciprocal_of_count(static_cast<Acc>(p.c));

  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    own.move_to(tile);
    Vec<T, kVec> held[kHeld], held_dy[kHeld];
    own.load_held(x, held);
    own.load_held(dy, held_dy);
    const PositionScale<Acc> scale = own.scale(x, held);
    const auto scale_of = [&](int) { return scale; };
    const auto dz_of = [&](int64_t c, Acc(&weight)[kVec], Acc(&v)[kVec], Acc(&d)[kVec]) {
      Acc bias[kVec];
      affine.load(affine.weights + c, weight);
      affine.load(affine.biases + c, bias);
      make_dz<T, kChain, kVec>(p, [&](int j) { return weight[j]; }, [&](int j) { return bias[j]; }, scale_of, v, d);
    };
    Acc dot_1 = 0, dot_x = 0;
    Acc dz[kHeld][kVec];
    const auto visit = [&](int64_t c, Acc(&v)[kVec], Acc(&d)[kVec], Acc(&to_x)[kVec], Acc(&to_1)[kVec]) {
      Acc weight[kVec];
      dz_of(c, weight, v, d);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        to_x[j] += d[j] * v[j];
        to_1[j] += d[j];
        const Acc g = d[j] * weight[j];
        dot_1 += g;
        dot_x += g * v[j];
      }
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) dz[k][j] = 0;
      if (!own.has(own.held_channel(k))) continue;
      Acc v[kVec];
      unpack(held[k], v);
      unpack(held_dy[k], dz[k]);
      visit(own.held_channel(k), v, dz[k], sum_x[k], sum_1[k]);
    }
    const auto again = [&](int64_t c, Acc(&v)[kVec], Acc(&d)[kVec]) {
      unpack(load_vec<T, kVec>(x + own.base + c), v);
      unpack(load_vec<T, kVec>(dy + own.base + c), d);
    };
    // A position has the whole warp where it is not held, so that each channel of the row is one lane's.
#pragma unroll 1
    for (int64_t c = own.held_channel(kHeld); c < p.c; c += int64_t(own.lanes) * kVec) {
      Acc v[kVec], d[kVec], to_x[kVec] = {}, to_1[kVec] = {};
      if (own.has(c)) {
        again(c, v, d);
        visit(c, v, d, to_x, to_1);
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        row_x[c + j] = (tile == blockIdx.x ? Acc(0) : row_x[c + j]) + to_x[j];
        row_1[c + j] = (tile == blockIdx.x ? Acc(0) : row_1[c + j]) + to_1[j];
      }
    }
    dot_1 = p.kind == ChannelNormKind::kLayer ? sum_over_lanes(dot_1, own.lanes) * inverse : Acc(0);
    dot_x = sum_over_lanes(dot_x, own.lanes);
    dot_x = scale.turns ? dot_x * inverse : Acc(0);
    const auto store = [&](int64_t c, Acc(&v)[kVec], const Acc(&d)[kVec]) {
      Acc weight[kVec];
      affine.load(affine.weights + c, weight);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Acc xhat = (v[j] - scale.mean) * scale.scale;
        v[j] = scale.scale * (rounded_product(d[j], weight[j]) - dot_1 - xhat * dot_x);
      }
      store_result<T, kVec>(dx + own.base + c, pack<T, kVec>(v));
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (!own.has(own.held_channel(k))) continue;
      Acc v[kVec];
      unpack(held[k], v);
      store(own.held_channel(k), v, dz[k]);
    }
#pragma unroll 1
    for (int64_t c = own.held_channel(kHeld); own.has(c); c += int64_t(own.lanes) * kVec) {
      Acc v[kVec], d[kVec], xhat[kVec];
      again(c, v, d);
#pragma unroll
      for (int j = 0; j < kVec; ++j) xhat[j] = v[j];
      Acc weight[kVec];
      dz_of(c, weight, xhat, d);
      store(c, v, d);
    }
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      for (int mask = own.lanes; mask <= 16; mask *= 2) {
        sum_x[k][j] += __shfl_xor_sync(0xffffffffu, sum_x[k][j], mask);
        sum_1[k][j] += __shfl_xor_sync(0xffffffffu, sum_1[k][j], mask);
      }
      const int64_t c = own.held_channel(k) + j;
      if (static_cast<int>(threadIdx.x) % 32 < own.lanes && c < p.c) {
        row_x[c] = sum_x[k][j];
        row_1[c] = sum_1[k][j];
      }
    }
  }
}

constexpr int kGradientWalkers = 16;

template <typename Acc>
__global__ void channel_norm_gradient_kernel(const __grid_constant__ ChannelNormGradientParams p) {
  __shared__ Acc shared[2][kGradientWalkers][32];
  const int lane = threadIdx.x % 32, walker = threadIdx.x / 32;
  const int64_t c = int64_t(blockIdx.x) * 32 + lane;
  const Acc* const sums = static_cast<const Acc*>(p.sums);
  Acc sum[2] = {};
  if (c < p.c) {
#pragma unroll 4
    for (int64_t row = walker; row < p.rows; row += kGradientWalkers) {
      sum[0] += sums[row * p.c + c];
      sum[1] += sums[(p.rows + row) * p.c + c];
    }
  }
  shared[0][walker][lane] = sum[0];
  shared[1][walker][lane] = sum[1];
  __syncthreads();
  if (walker > 1 || c >= p.c) return;
  Acc total = 0;
  for (int w = 0; w < kGradientWalkers; ++w) total += shared[walker][w][lane];
  store_as<Acc>(walker == 0 ? p.dweight : p.dbias, c, p.affine_dtype, total);
}

}  // namespace

Status run_channel_norm_backward(ChannelNormParams p, const ChannelNormPlan& plan, cudaStream_t stream) {
  p.along = plan.along;
  p.tiles = plan.tiles;
  p.rows = plan.rows;
  const dim3 grid(static_cast<unsigned>(plan.blocks));
  Status status;
  KGOPT_DISPATCH_CHANNEL_NORM(p, plan, false, T, kVec, kChain, {
    status = p.channels_last ? launch_kernel<&channel_norm_pixels_bwd_kernel<T, kVec, kChain>>(
                                   "channel_norm_pixels_bwd_kernel", p, grid, plan.threads, plan.smem_bytes, stream)
                             : launch_kernel<&channel_norm_planes_bwd_kernel<T, kVec, kChain>>(
                                   "channel_norm_planes_bwd_kernel", p, grid, plan.threads, plan.smem_bytes, stream);
  });
  return status;
}

Status run_channel_norm_gradient(const ChannelNormGradientParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.c + 31) / 32));
  if (p.is_double) {
    return launch_kernel<&channel_norm_gradient_kernel<double>>("channel_norm_gradient_kernel", p, grid,
                                                                kGradientWalkers * 32, 0, stream);
  }
  return launch_kernel<&channel_norm_gradient_kernel<float>>("channel_norm_gradient_kernel", p, grid,
                                                             kGradientWalkers * 32, 0, stream);
}

}  // namespace kgopt
