// How a reduction is cut into blocks. Plain arithmetic, free of CUDA, so that it can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

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

// Elements of an access of 16 bytes, where all tensors lie and divide so; else 1. float64 is read one by one: its
// kernels are large, and few.
template <typename Params>
int reduce_vector(const Params& p, int element_size, std::initializer_list<const void*> tensors) {
  const int vector = element_size == 8 ? 1 : 16 / element_size;
  bool fits = (p.inner > 1 ? p.inner : p.reduced) % vector == 0;
  for (const void* t : tensors) fits = fits && reinterpret_cast<uintptr_t>(t) % 16 == 0;
  return fits ? vector : 1;
}

// Threads that keep a large GPU's memory busy with kReduceBatch accesses each.
inline constexpr int64_t kReduceManyThreads = int64_t(1) << 16;

inline ReduceGeometry reduce_geometry(const ReduceParams& p) {
  ReduceGeometry g;
  const int64_t across = p.inner > 1 ? p.inner / p.vector : 1;  // accesses along inner, and along reduced
  const int64_t along = p.inner > 1 ? p.slice_length : (p.slice_length + p.vector - 1) / p.vector;
  const bool many = p.outer * across >= kReduceManyThreads;
  g.along_inner = power_of_two_at_least(across, across >= 64 && (many || along < 32) ? kReduceThreads : 32);
  // Threads that share a result merge theirs: no more of them than have a batch, unless the GPU would be empty.
  const int most = power_of_two_at_least((along + 1) / 2, kReduceThreads / g.along_inner);
  g.along_reduced = power_of_two_at_least((along + kReduceBatch - 1) / kReduceBatch, most);
  while (g.along_reduced < most && p.outer * across * g.along_reduced < kReduceManyThreads) g.along_reduced *= 2;
  g.along_outer = kReduceThreads / (g.along_inner * g.along_reduced);
  g.inner_blocks = (across + g.along_inner - 1) / g.along_inner;
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
  const int64_t wanted = int64_t(sm_count) * (p->vector > 1 ? 4 : 8) / std::max<int64_t>(1, blocks);
  const int unit = p->inner > 1 ? 1 : p->vector;
  const int64_t units = p->reduced / unit;
  const bool many = blocks * kReduceThreads >= kReduceManyThreads;  // without slices
  const int64_t most = many ? 1 : units / (int64_t(g.along_reduced) * kReduceBatch);
  const int64_t slices = std::max<int64_t>(1, std::min(wanted, most));
  p->slice_length = (units + slices - 1) / slices * unit;
  p->slices = (p->reduced + p->slice_length - 1) / p->slice_length;
}

}  // namespace kgopt
