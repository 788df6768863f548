// Steps of the backward kernels that keep a group on chip (groupnorm/cluster/params.h).
#pragma once

#include "groupnorm/cluster/params.h"
#include "groupnorm/shared/vectors.cuh"

namespace kgopt {

// Sums of dz and of dz (u - mean) over the elements of a channel that one thread sees.
template <typename Traits>
struct ChannelSums {
  float dz[2] = {}, dz_d[2] = {};
  template <int kSize>
  __device__ __forceinline__ void add(const GroupNormClusterBwdParams& p, float (&x)[kSize], float (&dy)[kSize],
                                      float mean, float scale, float shift) {
    constexpr bool kCoarse = kIsCoarse<typename Traits::T>;
    apply_chain<Traits::kPre, kCoarse>(p.pre_act, x);
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] -= mean;
    make_dz<Traits::kAct, kCoarse>(p.act, x, dy, [&](int) { return make_float2(scale, shift); });
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      dz[j % 2] += dy[j];
      dz_d[j % 2] += dy[j] * x[j];
    }
  }
};

// The sums of channel `c`, counted through all samples, which one thread tells.
__device__ __forceinline__ void put_channel_sums(const GroupNormClusterBwdParams& p, int64_t c, float2 sums) {
  if (p.dweight) {
    store_as(p.dbias, c, p.gradient_dtype, sums.x);
    store_as(p.dweight, c, p.gradient_dtype, sums.y);
  } else {
    reinterpret_cast<float2*>(p.channel_sums)[c] = sums;
  }
}

// x becomes dx; at(j) gives weight * rstd and bias.
template <typename Traits, int kSize, typename At>
__device__ __forceinline__ void input_gradient(const GroupNormClusterBwdParams& p, float (&x)[kSize],
                                               float (&dy)[kSize], float mean, At at, float2 terms) {
  make_dx<Traits::kPre, Traits::kAct, kIsCoarse<typename Traits::T>, false>(
      p.pre_act, p.act, x, dy, [&](int) { return mean; }, at, [&](int) { return terms; });
}

}  // namespace kgopt
