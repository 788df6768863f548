// GroupNorm backward of small groups of which a block or a team has one element a channel.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "common/device/floor.cuh"
#include "groupnorm/small/activations.cuh"
#include "groupnorm/small/small.cuh"

namespace kgopt {

// Nothing of a channel is added up here, and dweight and dbias have a thread each. A third of the instructions of
// group_norm_small_bwd_kernel, which come from memory as x does.
template <typename T_, int kElements_, Chain kAct_, bool kBlock_>
struct SingleTraits {
  using T = T_;
  static constexpr int kElements = kElements_;
  static constexpr Chain kAct = kAct_;
  static constexpr bool kBlock = kBlock_;  // a team is the block; else up to a warp
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kElements == kSmallMaxElements ? kSmallMaxBwdThreads : kSmallMaxThreads)
    group_norm_small_single_bwd_kernel(const __grid_constant__ GroupNormSmallBwdParams p) {
  using T = typename Traits::T;
  constexpr int kElements = Traits::kElements;
  constexpr bool kBlock = Traits::kBlock, kAny = Traits::kAct == Chain::kAny;
  __shared__ float2 shared[kSmallMaxWarps];
  let_dependents_start();
  const SmallShares& s = p.shares;
  const uint32_t tid = threadIdx.x, lanes = kBlock ? blockDim.x : s.by_lanes.d, team = kBlock ? 0 : s.by_lanes(tid);
  const uint32_t lane = tid - team * lanes, unit = kBlock ? blockIdx.x : blockIdx.x * s.teams + team;
  const bool active = kBlock || (team < s.teams && unit < s.units), wide = p.affine_dtype == Dtype::kFloat32;
  const uint32_t first = unit * s.elements, channel0 = first - s.by_groups(unit) * s.sample;
  const auto element = [&](int k) { return lane + k * lanes; };
  const auto has = [&](int k) { return active && element(k) < s.elements; };
  const bool weighted = p.weight != nullptr, biased = p.bias != nullptr && s.act_kind != Chain::kNone;
  // Parameters first, and all before any use: ptxas puts uses of x ahead of loads that come later.
  SmallAffine<T, kElements, true> weights, biases;
  T raw_x[kElements], raw_dy[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const uint32_t c = channel0 + element(k);
    weights.load_words(p.weight, k, c, has(k) && weighted && (wide || sizeof(T) == 4));
    if (sizeof(T) < 4) weights.load_halves(p.weight, k, c, has(k) && weighted && !wide);
    biases.load_words(p.bias, k, c, has(k) && biased && (wide || sizeof(T) == 4));
    if (sizeof(T) < 4) biases.load_halves(p.bias, k, c, has(k) && biased && !wide);
  }
  const float mean = load_in_order<float>(p.mean, unit, active), rstd = load_in_order<float>(p.rstd, unit, active);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    raw_x[k] = load_in_order<T>(p.x, first + element(k), has(k));
    raw_dy[k] = load_in_order<T>(p.dy, first + element(k), has(k));
  }
  float xhat[kElements], dz[kElements], z[kElements], slope[kElements], weight[kElements];
  uint32_t stopped = 0;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = to_acc(raw_x[k]);
    dz[k] = to_acc(raw_dy[k]);
    slope[k] = rstd;
  }
  if constexpr (kAny) stopped = apply_slope(s.pre_kind, p.pre_act, xhat, slope);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    weight[k] = weighted ? weights.value(k, wide) : 1.f;
    xhat[k] = (xhat[k] - mean) * rstd;
    z[k] = xhat[k] * weight[k] + (biased ? biases.value(k, wide) : 0.f);
  }
  if constexpr (kAny) {
    multiply_slope(s.act_kind, p.act, z, dz);
  } else {
    multiply_slopes<Traits::kAct, false>(floored(p.act), z, dz);
  }
  float terms[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const float own = weight[k] * dz[k];
    terms[0] += has(k) ? own : 0.f;
    terms[1] += has(k) ? own * xhat[k] : 0.f;
  }
  lanes_sum(kBlock ? 32 : lanes, terms);
  if (kBlock) {
    if (tid % 32 == 0) shared[tid / 32] = make_float2(terms[0], terms[1]);
    __syncthreads();
    const float2 other = tid % 32 < blockDim.x / 32 ? shared[tid % 32] : make_float2(0.f, 0.f);
    terms[0] = other.x;
    terms[1] = other.y;
    lanes_sum(32, terms);
  }
  // Divided, as in group_norm_small_bwd_kernel.
  const float elements = static_cast<float>(s.elements);
  terms[0] /= elements;
  terms[1] /= elements;
  T* const dx = static_cast<T*>(p.dx);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (!has(k)) continue;
    const float d = slope[k] * (weight[k] * dz[k] - (terms[0] + xhat[k] * terms[1]));
    dx[first + element(k)] = from_acc<T>(stopped >> k & 1 ? 0.f : d);
    const float product = dz[k] * xhat[k];
    if (s.owner) {
      store_gradient<T>(p.dbias, channel0 + element(k), p.gradient_dtype, dz[k]);
      store_gradient<T>(p.dweight, channel0 + element(k), p.gradient_dtype, product);
    } else {
      reinterpret_cast<float2*>(p.channel_sums)[first + element(k)] = make_float2(dz[k], product);
    }
  }
}

}  // namespace kgopt
