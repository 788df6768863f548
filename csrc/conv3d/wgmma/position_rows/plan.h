// Host-side planning of the convolution with positions as rows. Plain arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/wgmma/position_rows/params.h"
#include "conv3d/wgmma/tap_columns/plan.h"

namespace kgopt {

// Shared memory in bytes, in the order in which the kernel lays it out, from an address aligned to 1024.
struct PositionRowsSmemLayout {
  int weights;
  int barriers;
  int total;
};

KGOPT_HD int position_rows_x_stage_bytes(const PositionRowsPlan& p) {
  return (p.stage_rows * p.row_slots * p.row_bytes + 1023) / 1024 * 1024;
}
KGOPT_HD int position_rows_w_stage_bytes(const PositionRowsPlan& p) { return p.segments * 64 * p.row_bytes; }
KGOPT_HD PositionRowsSmemLayout position_rows_smem_layout(const PositionRowsPlan& p) {
  PositionRowsSmemLayout s{};
  s.weights = p.x_stages * position_rows_x_stage_bytes(p);
  s.barriers = s.weights + p.w_stages * position_rows_w_stage_bytes(p);
  const int pieces = p.normalizes ? p.x_stages * kPositionRowsPieces : 0;
  s.total = s.barriers + (4 * kPositionRowsMaxStages + 1 + pieces) * 8 + 1024;  // 1024: alignment
  return s;
}

// Row r of a weight image holds this channel of its tile: a thread then finds two neighbouring channels in its
// accumulators.
KGOPT_HD int position_rows_channel(int r) { return r / 16 * 16 + r % 8 * 2 + r / 8 % 2; }

KGOPT_HD int position_rows_part_channels(const PositionRowsPlan& p) { return p.chunks / 3 * (p.row_bytes / 4); }

// Cycles of a tile: products, or loads where those take longer, and what an epilogue leaves exposed.
inline double position_rows_tile_cycles(const PositionRowsPlan& p) {
  const double steps = double(p.taps[0]) * p.chunks, taps = p.taps[1] * p.taps[2];
  const double products = steps * taps * (p.row_bytes / 32) * kWgmmaConsumers * p.segments * p.columns / 2;
  const double bytes = steps * (position_rows_x_stage_bytes(p) + taps * position_rows_w_stage_bytes(p));
  const double promotions = p.parts == 2 ? steps * p.columns * 2 : 0;
  const bool half = p.math == ConvMath::kBf16 || p.math == ConvMath::kFp16;
  return std::max(products + promotions, bytes / 28) + (half ? 3300 : 5800);
}

inline PositionRowsPlan plan_position_rows(const ConvProblem& problem, const DeviceLimits& limits,
                                           bool normalizes = false) {
  PositionRowsPlan p;
  p.normalizes = normalizes;
  const auto refuse = refuser(p);
  if (problem.is_empty()) return refuse(kEmptyProblem);
  if (!limits.has_wgmma) return refuse("the device or the build has no wgmma");
  if (problem.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  p.math = conv_math(problem);
  p.parts = p.math == ConvMath::kTf32x3 ? 2 : 1;
  if (p.parts == 2 && normalizes) return refuse("fp32 accuracy reads a copy of x, which has no norm in front");
  if (!problem.channels_innermost) return refuse("x is not channels_last, or not in whole 16-byte pieces");
  if (problem.epilogue != ConvEpilogue::kStore) return refuse("an epilogue other than a store");
  if (problem.groups != 1) return refuse("grouped convolution");
  const int size = static_cast<int>(dtype_size(problem.dtype));
  if (problem.c_in * size % 16 != 0) return refuse("input channels are no multiple of 16 bytes");
  if (problem.c_out % 8 != 0) return refuse("output channels are no multiple of 8");
  if (problem.c_out > 8192) return refuse("more than 8192 output channels");
  for (int i = 0; i < 3; ++i) {
    if (const char* why = shifted_taps_refusal(problem, i, &p.padding[i])) return refuse(why);
    p.taps[i] = static_cast<int>(problem.kernel[i]);
    p.dilation[i] = static_cast<int>(problem.dilation[i]);
  }
  p.flip = problem.transposed;
  if (problem.in[2] + p.padding[2] > 256) return refuse("rows above 256 positions");
  p.plane_rows = static_cast<int>(problem.in[1] + p.padding[1]);
  const int span_h = (p.taps[1] - 1) * p.dilation[1], span_w = (p.taps[2] - 1) * p.dilation[2];
  const int64_t channel_bytes = problem.c_in * size;

  PositionRowsPlan best;
  double least = -1;
  for (const int columns : {256, 208, 128}) {          // such that the last round of blocks is full
    if ((columns == 128) != (p.parts == 2)) continue;  // fp32 accuracy keeps its sums twice
    for (const int row_bytes : {128, 64}) {
      PositionRowsPlan q = p;
      const int segments = 1;
      q.segments = segments;
      q.columns = columns;
      q.row_bytes = row_bytes;
      q.chunks = static_cast<int>((channel_bytes + row_bytes - 1) / row_bytes);
      if (p.parts == 2) {  // high by high, high by low, low by high
        q.copy_bytes = problem.n * problem.in[0] * problem.in[1] * problem.in[2] * q.chunks * 2 * row_bytes;
        q.chunks *= 3;
        if (q.copy_bytes >= int64_t(1) << 35) continue;
      }
      q.m_tiles = static_cast<int>((problem.c_out + segments * 64 - 1) / (segments * 64));
      const int tile = q.columns * kWgmmaConsumers;
      // Even: a thread's two positions are of one row, and every row begins at a multiple of 128 bytes.
      q.row_slots = std::max(8, static_cast<int>(problem.in[2] + p.padding[2] + 1) / 2 * 2);
      const int64_t positions = ((problem.out[0] - 1) * p.plane_rows + problem.out[1]) * q.row_slots;
      if (positions >= int64_t(1) << 29 || q.row_slots > 256) continue;
      q.stage_rows = (q.row_slots - 1 + tile - 1 + span_w) / q.row_slots + 1 + span_h;
      q.tiles_per_sample = static_cast<int>((positions + tile - 1) / tile);
      q.tiles = problem.n * int64_t(q.tiles_per_sample) * q.m_tiles;
      if (int64_t(q.stage_rows) * q.row_slots * row_bytes > limits.smem_per_block) continue;
      if (position_rows_smem_layout(q).total > limits.smem_per_block || q.tiles >= int64_t(1) << 30) continue;
      auto grow = [&](int* stages, int most) {
        while (*stages < most) {
          ++*stages;
          if (position_rows_smem_layout(q).total > limits.smem_per_block) {
            --*stages;
            break;
          }
        }
      };
      grow(&q.w_stages, 8);
      grow(&q.x_stages, 4);
      grow(&q.w_stages, kPositionRowsMaxStages);
      // A stage must be free early enough to be full again when the first warpgroup comes to it.
      const int taps = p.taps[1] * p.taps[2];
      const double tap_cycles = row_bytes / 32 * kWgmmaConsumers * segments * q.columns / 2;
      const int load_taps = static_cast<int>((position_rows_x_stage_bytes(q) / 28 + 1000) / tap_cycles) + 1;
      q.lag = std::max(0, std::min(q.w_stages - 2, (q.x_stages - 1) * taps - load_taps));
      q.blocks = static_cast<int>(std::min<int64_t>(q.tiles, limits.sm_count));
      const double rounds = double((q.tiles + q.blocks - 1) / q.blocks);
      const double cost = rounds * position_rows_tile_cycles(q);
      if (least < 0 || cost < least * 0.99) best = q, least = cost;
    }
  }
  if (least < 0) return refuse("a tile does not fit in shared memory");
  p = best;
  p.piece_rows = (p.stage_rows + kPositionRowsPieces - 1) / kPositionRowsPieces;
  p.by_m_tiles = known_divisor(p.m_tiles);
  p.by_tiles_per_sample = known_divisor(p.tiles_per_sample);
  p.by_row = known_divisor(p.row_slots);
  p.by_plane = known_divisor(p.plane_rows);
  p.smem_bytes = position_rows_smem_layout(p).total;
  p.packed_bytes = int64_t(p.m_tiles) * p.taps[0] * p.chunks * p.taps[1] * p.taps[2] * position_rows_w_stage_bytes(p);
  if (p.packed_bytes >= int64_t(1) << 34) return refuse("too many weights");
  return p;
}

// Whether a norm in front is expected to be faster than a pass that normalizes x and the plain convolution. Three warps
// normalize a stage beside the products of the one before; what takes them longer than the products, the products wait
// for, and for all of the first. Cycles fitted on an H200: of part of a row, and of 16 bytes of each lane, which the
// products' own reads of shared memory slow down. With SiLU, or where channel tiles repeat it, the pass wins.
inline bool position_rows_norm_pays(const ConvProblem& problem, const PositionRowsPlan& p, Chain act) {
  const bool half = dtype_size(problem.dtype) == 2, wide = p.row_bytes == 128;
  double vector = act == Chain::kSilu ? (wide ? 135 : 197) : !wide ? 137 : half ? 91 : 83;
  // Halves of rows below a batch are normalized vector by vector.
  if ((problem.in[2] + 31) / 32 * 16 < (half ? 16 : 32) * (wide ? 1 : 2)) vector *= 2;
  const double vectors = double(problem.in[2]) * (p.row_bytes / 16) / 32;  // of a lane, in a row
  const double stage = double(p.stage_rows) / kPositionRowsNormalizers * (2 * (wide ? 440 : 95) + vectors * vector);
  const double products = double(p.taps[1]) * p.taps[2] * (p.row_bytes / 32) * p.columns;
  const double rounds = double((p.tiles + p.blocks - 1) / std::max(p.blocks, 1));
  const double exposed = (rounds * p.taps[0] * p.chunks * std::max(stage - products, 0.0) + stage) / 1755;
  const double x_bytes = double(problem.n) * problem.c_in * problem.in[0] * problem.in[1] * problem.in[2] *
                         static_cast<double>(dtype_size(problem.dtype));
  return exposed < 0.9 * (5 + 2 * x_bytes / 3.8e6);
}

}  // namespace kgopt
