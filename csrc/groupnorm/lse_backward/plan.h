// How the backward of logsumexp behind a norm walks its tensors, or why it does not take them. Host code, free of CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/refusal.h"
#include "common/traverse_plan.h"
#include "groupnorm/params.h"

namespace kgopt {

inline constexpr int kLseVector = 4;         // elements of a load, of every dtype but float64
inline constexpr int kLseChannelSteps = 8;   // contiguous: channels of a thread
inline constexpr int kLsePositionSteps = 4;  // channels_last: positions under way

struct NormLseBackwardPlan {
  const char* refusal = nullptr;  // why not, or null
  int vector = 1;                 // elements of a load along the innermost dim: kLseVector or 1
  // The pass that fills the shares. channels_last: share_lanes threads of a warp, a power of two, have a position.
  int share_lanes = 1;
  int64_t share_slices = 1, share_slice_length = 0;  // channels_last: how a sample's positions are cut
  int64_t share_blocks = 0;
  // The passes for the sums and for dx.
  ColumnGeometry columns;  // channels_last alone
  int64_t slices = 1, slice_length = 0, blocks = 0;
};

// aligned: x, dx and dlse start at a multiple of 16 bytes.
inline NormLseBackwardPlan plan_norm_lse_backward(const GroupNormDims& d, bool aligned, int sm_count) {
  NormLseBackwardPlan p;
  const auto refuse = refused<NormLseBackwardPlan>;
  if (d.numel() == 0) return refuse("x has no elements");
  // Vectors where every row of x and of dlse starts at one; float64, whose exponentials are long, has code for single
  // values.
  const int64_t innermost = d.channels_last ? d.c : d.s;
  p.vector = d.dtype != Dtype::kFloat64 && aligned && innermost % kLseVector == 0 ? kLseVector : 1;
  if (d.channels_last) {
    p.columns = column_geometry(d.c, p.vector);
    plan_slices(d.n * p.columns.channel_blocks, d.s, int64_t(p.columns.walkers) * kLsePositionSteps * 2, 1, sm_count,
                &p.slices, &p.slice_length);
    p.blocks = d.n * p.columns.channel_blocks * p.slices;
    while (p.share_lanes < 32 && p.share_lanes * p.vector < d.c) p.share_lanes *= 2;
    const int walkers = kTraverseThreads / p.share_lanes;
    plan_slices(d.n, d.s, int64_t(walkers) * kLsePositionSteps, 1, sm_count, &p.share_slices, &p.share_slice_length);
    p.share_blocks = d.n * p.share_slices;
  } else {
    const int64_t chunks = (d.c + kLseChannelSteps - 1) / kLseChannelSteps;
    plan_slices(d.n * chunks, d.s, kTraverseThreads * kLseVector, kLseVector, sm_count, &p.slices, &p.slice_length);
    p.blocks = d.n * chunks * p.slices;
    const int64_t tile = 32 * p.vector;
    p.share_blocks = d.n * ((d.s + tile - 1) / tile);
  }
  if (std::max(p.blocks, p.share_blocks) > 0x7fffffff) return refuse("x has too many elements for one launch");
  return p;
}

}  // namespace kgopt
