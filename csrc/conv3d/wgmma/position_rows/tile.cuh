// Where a tile of the convolution with positions as rows lies, for all warps of its kernel.
#pragma once

#include "conv3d/wgmma/common.cuh"
#include "conv3d/wgmma/position_rows/params.h"

namespace kgopt {

struct PositionRowsTile {
  int n, m_tile;
  int q0;         // first position
  int first_row;  // of the rows counted through all planes
  DepthTaps kd;
};

template <int kTile>
__device__ __forceinline__ PositionRowsTile position_rows_tile(const PositionRowsParams& p, int tile) {
  const PositionRowsPlan& plan = p.plan;
  PositionRowsTile t;
  const int rest = plan.by_m_tiles(tile);
  t.m_tile = tile - rest * plan.m_tiles;
  t.n = plan.by_tiles_per_sample(rest);
  t.q0 = (rest - t.n * plan.tiles_per_sample) * kTile;
  t.first_row = plan.by_row(t.q0);
  const int lo = plan.by_plane(t.first_row) - plan.padding[0];
  const int hi = min(plan.by_plane(plan.by_row(t.q0 + kTile - 1)), p.out[0] - 1) - plan.padding[0];
  t.kd = depth_taps(lo, hi, p.in[0], plan.taps[0], plan.dilation[0]);
  return t;
}

// Rows of x that all taps of height and width read.
template <int kTile>
__device__ __forceinline__ int rows_of_stage(const PositionRowsPlan& plan, const PositionRowsTile& t) {
  const int reach = (plan.taps[1] - 1) * plan.dilation[1] * plan.row_slots + (plan.taps[2] - 1) * plan.dilation[2];
  return plan.by_row(t.q0 + kTile - 1 + reach) - t.first_row + 1;
}

}  // namespace kgopt
