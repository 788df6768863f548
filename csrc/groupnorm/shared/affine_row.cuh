// What the merges leave of each (sample, channel) for the passes that follow.
#pragma once

#include "common/device/dtype.cuh"
#include "groupnorm/params.h"

namespace kgopt {

template <typename Acc>
struct alignas(16) AffineRow {
  Acc mean, rstd, weight, bias;
};

// The row of channel c of sample n from statistics and parameters as they lie.
template <typename Acc>
__device__ __forceinline__ AffineRow<Acc> make_affine_row(const AffineSource& p, int64_t n, int64_t c) {
  const int64_t group = n * p.g + c / (p.c / p.g);
  const Acc mean = static_cast<const Acc*>(p.mean)[group], rstd = static_cast<const Acc*>(p.rstd)[group];
  // Both parameters in one trip to memory: a conversion waits for what it converts.
  Acc weight = 1, bias = 0;
  const auto load = [&](auto zero) {
    using T = decltype(zero);
    T own_weight = zero, own_bias = zero;
    if (p.weight) own_weight = static_cast<const T*>(p.weight)[n * p.affine_stride + c];
    if (p.bias) own_bias = static_cast<const T*>(p.bias)[n * p.affine_stride + c];
    if (p.weight) weight = static_cast<Acc>(to_acc(own_weight));
    if (p.bias) bias = static_cast<Acc>(to_acc(own_bias));
  };
  switch (p.affine_dtype) {
    case Dtype::kBFloat16: load(__nv_bfloat16()); break;
    case Dtype::kFloat16: load(__half()); break;
    case Dtype::kFloat64: load(0.0); break;
    default: load(0.f);
  }
  return {mean, rstd, weight, bias};
}

// The norm by distances from the mean, xhat times the deviation: (x - mean) * scale + bias.
template <typename Acc>
struct DistanceRow {
  Acc mean, scale, bias, rstd;
};
// Of row `row` of all samples' channels.
template <typename Acc>
__device__ __forceinline__ DistanceRow<Acc> make_distance_row(const AffineSource& p, int64_t row) {
  const AffineRow<Acc> r = make_affine_row<Acc>(p, row / p.c, row % p.c);
  return {r.mean, r.rstd * r.weight, r.bias, r.rstd};
}

// AffineRow for dx, with the group's terms: (sum dz * weight, sum dz * weight * xhat) / (elements of a group). Where dz
// is the same all over a sample, dz * weight is taken off the first.
template <typename Acc>
struct alignas(16) GradientRow {
  AffineRow<Acc> affine;
  Acc term, term_xhat;
  Acc unused[2];
};

}  // namespace kgopt
