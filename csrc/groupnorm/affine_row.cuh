// What the merges leave of each (sample, channel) for the passes that follow.
#pragma once

#include "../common/dtype.cuh"
#include "groupnorm_params.h"

namespace kgopt {

template <typename Acc>
struct alignas(16) AffineRow {
  Acc mean, rstd, weight, bias;
};

// The row of channel c of sample n from statistics and parameters as they lie.
template <typename Acc>
__device__ __forceinline__ AffineRow<Acc> make_affine_row(const AffineSource& p, int64_t n, int64_t c) {
  const int64_t group = n * p.g + c / (p.c / p.g);
  return {static_cast<const Acc*>(p.mean)[group], static_cast<const Acc*>(p.rstd)[group],
          p.weight ? load_as<Acc>(p.weight, c, p.affine_dtype) : Acc(1),
          p.bias ? load_as<Acc>(p.bias, c, p.affine_dtype) : Acc(0)};
}

// The same for dx, with the group's terms: (sum dz * weight, sum dz * weight * xhat) / (elements of a group). Where dz
// is the same all over a sample, dz * weight is taken off the first.
template <typename Acc>
struct alignas(16) GradientRow {
  AffineRow<Acc> affine;
  Acc term, term_xhat;
  Acc unused[2];
};

}  // namespace kgopt
