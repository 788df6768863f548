// Host-side planning of the transposed convolution with its norm. Plain arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "common/refusal.h"
#include "conv3d/norm_conv/scaled_half_params.h"
#include "conv3d/wgmma/tap_columns/plan.h"
#include "conv3d/wgmma/transposed_norm/params.h"

namespace kgopt {

// Shared memory in bytes, in the order in which the kernel lays it out, from an address aligned to 1024.
struct TransposedNormSmemLayout {
  int weights;  // a ring for each warpgroup
  int pieces;   // kTransposedNormHelpers x kTransposedNormPieces
  int moments;  // [2 samples][3][channels] floats
  int table;    // [channels] float4
  int barriers;
  int total;
};

inline constexpr int kTransposedNormBarriers =
    2 * (1 + kWgmmaConsumers) * kTransposedNormMaxStages + 1 + 4 + kTransposedNormPieces * kTransposedNormHelpers;

// Of a sample's tiles with fewer taps, the first one's place in the order of its tiles, which goes around.
KGOPT_HD int transposed_norm_short_place(int step, int n, const TransposedNormPlan& p) {
  return n * step % p.short_blocks % p.tiles_per_sample;
}

KGOPT_HD int transposed_norm_x_stage_bytes(const TransposedNormPlan& p) {
  return (p.boxes * p.box_rows * kTransposedNormRowBytes + 1023) / 1024 * 1024;
}
inline constexpr int kTransposedNormWeightBytes = kTransposedNormChannels * kTransposedNormRowBytes;
inline constexpr int kTransposedNormHalfBytes = kTransposedNormHalfChannels * kTransposedNormRowBytes;
KGOPT_HD TransposedNormSmemLayout transposed_norm_smem_layout(const TransposedNormPlan& p) {
  TransposedNormSmemLayout s{};
  const int channels = p.m_tiles * kTransposedNormChannels;
  s.weights = p.x_stages * transposed_norm_x_stage_bytes(p);
  s.pieces = s.weights + p.w_stages * kTransposedNormWeightBytes;
  s.moments = s.pieces + kTransposedNormHelpers * kTransposedNormPieces * kTransposedNormPieceBytes;
  s.table = s.moments + 2 * 3 * channels * 4;
  s.barriers = s.table + channels * 16;
  s.total = s.barriers + kTransposedNormBarriers * 8 + 16 + 1024;  // 1024: alignment
  return s;
}

// Tiles at both ends of the depth have fewer taps. Those of a sample are neighbours, and where they are among its tiles
// moves from sample to sample, such that the blocks share them as evenly as a constant step allows.
inline void plan_transposed_norm_places(TransposedNormPlan* p, int64_t samples) {
  const int64_t tile = int64_t(p->columns) * kWgmmaConsumers;
  const int count = p->tiles_per_sample, step = p->dilation[0], span = (p->taps[0] - 1) * step;
  const int head = static_cast<int>(std::min<int64_t>((int64_t(span) * p->plane + tile - 1) / tile, count));
  const int tail = static_cast<int>(std::max<int64_t>(0, count - int64_t(p->in[0]) * p->plane / tile));
  const int few = head + tail;
  p->short_blocks = std::max(1, p->blocks / p->m_tiles);
  p->first_short = p->short_step = 0;
  if (few >= count) return;
  p->first_short = count - tail;

  constexpr int kTried = 1 << 15;  // additions: some ten microseconds
  const int tried = static_cast<int>(std::min<int64_t>(samples, p->short_blocks));
  const int steps = std::min(p->short_blocks, kTried / std::max(1, few * tried));
  std::vector<int> saved(few), work(p->short_blocks);
  for (int i = 0; i < few; ++i) {
    const int64_t q = (p->first_short + i) % count * tile;
    const int lo = static_cast<int>(q / p->plane) - span;
    const int hi = static_cast<int>(std::min<int64_t>((q + tile - 1) / p->plane, p->out[0] - 1)) - span;
    const DepthTaps kd = depth_taps(lo, hi, p->in[0], p->taps[0], step);
    saved[i] = p->taps[0] - (kd.end - kd.first);
  }
  int least = -1;
  for (int i = 0; i < steps; ++i) {
    // Blocks that have a tile more than others begin with its taps.
    const int64_t all = int64_t(tried) * count;
    for (int block = 0; block < p->short_blocks; ++block) work[block] = block < all % p->short_blocks ? p->taps[0] : 0;
    for (int n = 0; n < tried; ++n) {
      int place = transposed_norm_short_place(i, n, *p);
      const int first = static_cast<int>(int64_t(n) * count % p->short_blocks);
      for (int j = 0; j < few; ++j) {
        work[(first + place) % p->short_blocks] -= saved[j];
        if (++place == count) place = 0;
      }
    }
    const int most = *std::max_element(work.begin(), work.end());
    if (i == 0 || most < least) p->short_step = i, least = most;
    const int blocks = p->short_blocks, total = std::accumulate(work.begin(), work.end(), 0);
    if (int64_t(most - 1) * blocks < total) break;  // none is better
  }
}

// `problem` has the output's sizes; its epilogue is ignored. `scaled`: fp32 operands as scaled fp16, where TF32 is
// allowed.
inline TransposedNormPlan plan_transposed_norm(const ConvProblem& problem, const DeviceLimits& limits,
                                               bool scaled = false) {
  TransposedNormPlan p;
  const auto refuse = refuser(p);
  if (problem.is_empty()) return refuse(kEmptyProblem);
  if (!limits.has_wgmma) return refuse("the device or the build has no wgmma");
  if (problem.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  p.math = conv_math(problem);
  if (scaled) {
    if (p.math != ConvMath::kTf32) return refuse("scaled fp16 is in place of TF32 alone");
    if (problem.kernel[0] * problem.kernel[1] * problem.kernel[2] > kScaledMostTaps) return refuse("too many taps");
    p.math = ConvMath::kFp16;
    p.scaled = true;
  }
  p.parts = p.math == ConvMath::kTf32x3 ? 2 : 1;
  if (problem.groups != 1) return refuse("grouped convolution");
  if (problem.n > kTransposedNormMostBatch) return refuse("more samples than a grid has layers");
  const int size = static_cast<int>(dtype_size(problem.dtype)), operand_size = scaled ? 2 : size;
  for (int i = 0; i < 3; ++i) {
    if (const char* why = shifted_taps_refusal(problem, i)) return refuse(why);
    const int64_t span = (problem.kernel[i] - 1) * problem.dilation[i];
    if (problem.out[i] != problem.in[i] + span) return refuse("padding");
    p.taps[i] = static_cast<int>(problem.kernel[i]);
    p.dilation[i] = static_cast<int>(problem.dilation[i]);
    p.in[i] = static_cast<int>(problem.in[i]);
    p.out[i] = static_cast<int>(problem.out[i]);
  }
  const int64_t plane = problem.out[1] * problem.out[2], positions = plane * problem.out[0];
  if (positions >= int64_t(1) << 29) return refuse("a sample is too large");
  if (positions * size % 16 != 0) return refuse("output channels are not in whole 16-byte pieces");
  if (positions * problem.c_out >= int64_t(1) << 30) return refuse("a sample is too large");
  if (problem.n > 32768) return refuse("a batch above 32768");
  if (problem.c_out > 512) return refuse("more than 512 output channels");
  p.flip = problem.transposed;
  p.plane = static_cast<int>(plane);
  p.slots = problem.in[0] * plane;
  const int row_reach = (p.taps[1] - 1) * p.dilation[1] * p.out[2], column_reach = (p.taps[2] - 1) * p.dilation[2];
  p.reach = static_cast<int>((p.taps[0] - 1) * p.dilation[0] * plane) + row_reach + column_reach;
  p.chunks = static_cast<int>((problem.c_in * operand_size + kTransposedNormRowBytes - 1) / kTransposedNormRowBytes);
  p.m_tiles = static_cast<int>((problem.c_out + kTransposedNormChannels - 1) / kTransposedNormChannels);
  p.sample_bytes = p.slots * p.chunks * p.parts * kTransposedNormRowBytes;
  const int64_t images = int64_t(p.m_tiles) * p.taps[0] * p.chunks * p.taps[1] * p.taps[2] * p.parts;
  p.packed_bytes = images * kTransposedNormWeightBytes;
  if (p.packed_bytes >= int64_t(1) << 34) return refuse("too many weights");

  // The tile's length such that the last round of blocks is full.
  double least = -1;
  for (const int columns : {184, 128, 96}) {
    if ((columns == 96) != (p.parts == 2)) continue;  // 3xTF32 keeps its sums twice
    const int64_t tile = columns * kWgmmaConsumers;
    const int64_t tiles = problem.n * p.m_tiles * ((positions + tile - 1) / tile);
    const double cost = double((tiles + limits.sm_count - 1) / limits.sm_count) * (columns + 8);
    if (least >= 0 && cost >= least) continue;
    for (const bool whole_height : {true, false}) {
      TransposedNormPlan q = p;
      q.columns = columns;
      q.whole_height = whole_height;
      const int need = static_cast<int>(tile) + (whole_height ? row_reach : 0) + column_reach;
      q.boxes = (need + 255) / 256;
      q.box_rows = ((need + q.boxes - 1) / q.boxes + 7) / 8 * 8;
      if (transposed_norm_smem_layout(q).total > limits.smem_per_block) continue;
      q.tiles_per_sample = static_cast<int>((positions + tile - 1) / tile);
      q.tiles = tiles;
      while (q.w_stages < kTransposedNormMaxStages) {
        ++q.w_stages;
        if (transposed_norm_smem_layout(q).total > limits.smem_per_block) {
          --q.w_stages;
          break;
        }
      }
      p = q;
      least = cost;
      break;
    }
  }
  if (least < 0) return refuse("a tile does not fit in shared memory");
  if (p.tiles >= int64_t(1) << 30) return refuse("too many tiles");
  p.blocks = static_cast<int>(std::min<int64_t>(p.tiles, limits.sm_count));
  plan_transposed_norm_places(&p, problem.n);
  // One warpgroup's epilogue falls into the other's products, within half of a stage of x.
  p.lag = (p.whole_height ? p.taps[1] : 1) * p.taps[2] / 2;
  p.by_m_tiles = known_divisor(p.m_tiles);
  p.by_tiles_per_sample = known_divisor(p.tiles_per_sample);
  p.by_plane = known_divisor(plane);
  p.channel_vectors = static_cast<int>(positions * size / 16);
  p.by_channel = known_divisor(p.channel_vectors);
  p.smem_bytes = transposed_norm_smem_layout(p).total;
  return p;
}

}  // namespace kgopt
