// Host-side planning of the input gradient for few channels: tile shape, chunks of channels, shared memory layout,
// grid. Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "common/refusal.h"
#include "conv3d/gradients/few_dgrad/params.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

// Shared memory in bytes, in the order in which the kernel lays it out.
struct FewDgradLayout {
  int weights;  // fragments of the products: [chunk][k step][row tile][part][lane] of 16 bytes
  int offsets;  // where the 8 channels of a k step (half: two times) begin in a stage; -1: beyond the last
  int units;    // int2 per unit of a tile: where it lies in dy and in the sums
  int rows;     // CopiedRow per (channel, row) of dy
  int dx_rows;  // CopiedRow per (channel, row) of dx
  int zeros;    // 128 bytes
  int stages;
  int total;
};

KGOPT_HD FewDgradLayout few_dgrad_layout(const FewDgradPlan& p, int c_in) {
  auto align = [](int bytes) { return (bytes + 127) / 128 * 128; };
  FewDgradLayout s{};
  s.weights = 0;
  s.offsets = s.weights + p.chunks * p.k_steps * p.row_tiles * p.parts * 512;
  s.units = s.offsets + align(p.k_steps * 8);
  s.rows = s.units + align(kFewDgradWarps * p.units * 8);
  s.dx_rows = s.rows + align(p.dy_copy.slots * 16);
  s.zeros = s.dx_rows + align(c_in * p.tile[0] * p.tile[1] * 16);
  s.stages = s.zeros + 128;
  s.total = s.stages + p.stage_bytes * p.stages;
  return s;
}

namespace plan_detail {

// Fills everything that depends on the tile shape. False when it does not fit in shared memory.
inline bool few_dgrad_tile(FewDgradPlan* p, const ConvProblem& q, const DeviceLimits& limits, int d, int h,
                           int channels) {
  const bool half = q.dtype != Dtype::kFloat32;
  const int size = half ? 2 : 4;
  p->tile[0] = d, p->tile[1] = h;
  p->channels = channels;
  p->chunks = static_cast<int>((q.c_out + channels - 1) / channels);
  const int pairs = channels / 8 * p->kernel[0] * p->kernel[1];
  const int together = p->marches ? p->kernel[1] : 1;
  p->k_steps = half ? (pairs / together + 1) / 2 * together : pairs;
  for (int i = 0; i < 2; ++i) {
    p->halo[i] = p->tile[i] + (p->kernel[i] - 1) * p->dilation[i];
    p->tiles[i] = (q.in[i] + p->tile[i] - 1) / p->tile[i];
  }
  if (p->halo[0] > 1000 || p->halo[1] > 30000) return false;
  p->pitch = p->units_w * kFewDgradUnit * size;
  // Matrices of 8 channels by 16 bytes are loaded; in TF32 vectors of 4 channels by 32 bytes.
  p->channel = p->halo[0] * p->halo[1] * p->pitch;
  while (p->channel % 128 != (half ? 16 : 32)) p->channel += 16;
  p->scratch_channel = d * h * (p->units_w * kFewDgradUnit + 4);
  while (p->scratch_channel % 32 != (half ? 8 : 1)) ++p->scratch_channel;  // neighbouring channels: other banks
  const int64_t dy_row = p->dy_is_made ? made_row_elements(q.out[2], size) : q.out[2];
  p->dy_copy = few_copy(dy_row * size, p->pitch, channels * p->halo[0] * p->halo[1], kFewDgradThreads);
  // At the end room for one row more.
  const int64_t stage = p->pitch + std::max(int64_t(channels) * p->channel,
                                            int64_t(q.c_in) * p->scratch_channel * int64_t(sizeof(float)));
  if (stage > limits.smem_per_block) return false;
  p->stage_bytes = static_cast<int>((stage + 127) / 128 * 128);
  p->all_tiles = q.n * p->tiles[0] * p->tiles[1];
  p->smem_bytes = few_dgrad_layout(*p, static_cast<int>(q.c_in)).total;
  return p->smem_bytes <= limits.smem_per_block && p->blocks_per_sm * (p->smem_bytes + 1024) <= limits.smem_per_sm;
}

// Estimated cycles of a multiprocessor for a tile: the slowest of products, shared memory and copies.
inline double few_dgrad_cost(const FewDgradPlan& p, const ConvProblem& q) {
  const double units = kFewDgradWarps * p.units;
  const double steps = double(p.chunks) * p.k_steps;
  const double mma = steps * units * 4 * p.row_tiles * 2 * (p.parts == 2 ? 3 : 1);
  const double loads = p.marches ? (p.units + 2.0) / (p.units * p.kernel[1]) : 1;  // of dy, for a step
  const double shared = steps * (units * 8 * loads + kFewDgradWarps * (4.0 * p.row_tiles * p.parts + 1));
  const double rows = double(p.chunks) * p.channels * p.halo[0] * p.halo[1];
  const double copies = rows * p.dy_copy.pieces / 32 * 12;
  const double sums = units * 32 * kFewDgradTaps * double(q.c_in) * 4 / 128 * 3;
  const double memory = rows * (p.pitch + 32) / 30;
  return std::max(std::max(mma, memory), shared + sums + copies) + 0.2 * (mma + copies) + 300 * p.chunks + 800;
}

}  // namespace plan_detail

// Of contiguous tensors at multiples of 16 bytes. `dy_is_made`: its rows are of made_row_elements.
inline FewDgradPlan plan_few_dgrad(const ConvProblem& q, const DeviceLimits& limits, bool dy_is_made = false) {
  FewDgradPlan p;
  p.dy_is_made = dy_is_made;
  const auto refuse = refuser(p);
  if (const char* why = few_gradient_refusal(q, limits)) return refuse(why);
  p.math = conv_math(q);
  p.parts = conv_split_factor(p.math);
  if (q.out[2] * (q.dtype == Dtype::kFloat32 ? 4 : 2) % 4 != 0) return refuse("rows of an odd number of half values");
  for (int i = 0; i < 3; ++i) {
    if (q.stride[i] != 1) return refuse("a stride");
    p.kernel[i] = static_cast<int>(q.kernel[i]);
    p.padding[i] = static_cast<int>(q.padding[i]);
    if (i < 2) p.dilation[i] = static_cast<int>(q.dilation[i]);
  }
  if (p.kernel[2] > kFewDgradTaps) return refuse("a kernel wider than 3");
  if (q.dilation[2] != 1 && p.kernel[2] > 1) return refuse("a dilation of the width");
  // Beyond, dx has positions that no position of dy reaches, and none are computed for them.
  if (p.padding[2] > p.kernel[2] - 1) return refuse("a padding of the width above the kernel's");
  // Offsets within a sample are numbers of 32 bits.
  if (4.0 * std::max(q.c_in, q.c_out) * double(q.in[0]) * double(q.in[1]) * double(q.in[2]) > 1.6e10 ||
      4.0 * q.c_out * double(q.out[0]) * double(q.out[1]) * double(q.out[2]) > 1.6e10) {
    return refuse("a sample of more than 16 GB");
  }
  const int64_t rows = q.c_in * q.kernel[2];
  if (rows > 32) return refuse("input channels times taps of the width above 32");
  p.row_tiles = rows <= 16 ? 1 : 2;
  p.units = p.row_tiles == 1 ? 4 : 2;
  p.units_w = static_cast<int>(std::min<int64_t>((q.out[2] + kFewDgradUnit - 1) / kFewDgradUnit, 1 << 20));
  p.dx_vector = q.dtype != Dtype::kFloat32 && q.in[2] % 2 == 0 ? 2 : 1;
  while (p.dx_across_log2 < 8 && p.dx_vector << p.dx_across_log2 < q.in[2]) ++p.dx_across_log2;
  const int most_rows = kFewDgradWarps * p.units / p.units_w;
  if (most_rows == 0) return refuse("rows of more positions than a block has");
  double best = -1;
  FewDgradPlan chosen;
  // With fp32 accuracy and two row tiles registers are too few.
  const bool may_march = p.kernel[1] == kFewDgradTaps && p.dilation[1] == 1 && (p.parts == 1 || p.row_tiles == 1);
  for (bool marches : {true, false}) {  // the first where products bound both: it converts half as many words
    if (marches && !may_march) continue;
    p.marches = marches;
    for (int d : {1, 2, 3, 4, 6, 8}) {
      if (d > q.in[0] || d > most_rows) break;
      const int step = p.marches ? p.units : 1;  // rows of a warp are those of one plane
      for (int h = step; h <= most_rows / d && h < q.in[1] + step; h += step) {
        for (int channels : {8, 16, 24, 32}) {
          if (channels > (q.c_out + 7) / 8 * 8) break;
          for (const auto& [blocks_per_sm, stages] :
               {std::pair(2, 3), std::pair(2, 2), std::pair(1, 3), std::pair(1, 2)}) {
            if (blocks_per_sm > few_dgrad_blocks_per_sm(p.math, p.row_tiles)) continue;
            p.blocks_per_sm = blocks_per_sm;
            p.stages = stages;
            if (!plan_detail::few_dgrad_tile(&p, q, limits, d, h, channels)) continue;
            const double rounds = std::ceil(double(p.all_tiles) / (double(blocks_per_sm) * limits.sm_count));
            // Alone, a block has nobody to work while it waits.
            const double cost = rounds * blocks_per_sm * plan_detail::few_dgrad_cost(p, q) *
                                (stages == 2 ? 1.05 : 1.0) * (blocks_per_sm == 1 ? 1.3 : 1.0);
            if (best < 0 || cost < best) {
              best = cost;
              chosen = p;
            }
          }
        }
      }
    }
  }
  if (best < 0) return refuse("a tile does not fit in shared memory");
  p = chosen;
  if (p.all_tiles > (int64_t(1) << 31) - 1) return refuse("more than 2^31 tiles");
  p.cycles = best;
  p.blocks = static_cast<int>(std::min<int64_t>(p.all_tiles, p.blocks_per_sm * limits.sm_count));
  return p;
}

}  // namespace kgopt
