// How a reduction is cut into blocks. Plain arithmetic, free of CUDA, so that it can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "reduce/reduce_params.h"

namespace kgopt {

inline constexpr int kReduceThreads = 256;
inline constexpr int kReduceBatch = 8;  // loads of a thread in flight

struct ReduceGeometry {
  int along_inner, along_reduced, along_outer;  // threads; their product is kReduceThreads
  int64_t inner_blocks, outer_blocks;
};

inline int power_of_two_at_least(int64_t v, int most) {
  int p = 1;
  while (p < v && p < most) p *= 2;
  return p;
}

inline ReduceGeometry reduce_geometry(const ReduceParams& p) {
  ReduceGeometry g;
  g.along_inner = power_of_two_at_least(p.inner, p.inner >= 64 && p.reduced < 32 ? kReduceThreads : 32);
  g.along_reduced = power_of_two_at_least((p.slice_length + 1) / 2, kReduceThreads / g.along_inner);
  g.along_outer = kReduceThreads / (g.along_inner * g.along_reduced);
  g.inner_blocks = (p.inner + g.along_inner - 1) / g.along_inner;
  g.outer_blocks = (p.outer + g.along_outer - 1) / g.along_outer;
  return g;
}

// Sets slices and slice_length so that few long reductions fill the GPU too.
inline void plan_reduce(ReduceParams* p, int sm_count) {
  p->slices = 1;
  p->slice_length = std::max<int64_t>(1, p->reduced);
  if (p->outer * p->inner * p->reduced == 0) return;
  const ReduceGeometry g = reduce_geometry(*p);
  const int64_t blocks = g.inner_blocks * g.outer_blocks;
  const int64_t wanted = int64_t(sm_count) * 8 / std::max<int64_t>(1, blocks);
  const int64_t most = p->reduced / (int64_t(g.along_reduced) * kReduceBatch);
  const int64_t slices = std::max<int64_t>(1, std::min(wanted, most));
  p->slice_length = (p->reduced + slices - 1) / slices;
  p->slices = (p->reduced + p->slice_length - 1) / p->slice_length;
}

}  // namespace kgopt
