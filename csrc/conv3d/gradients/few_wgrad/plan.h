// Host-side planning of the weight gradient for few channels: which tiles of products a warp has, tile shape, shared
// memory layout, grid. Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/gradients/few_wgrad/params.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

// Shared memory in bytes, in the order in which the kernel lays it out.
struct FewWgradLayout {
  int units;    // int4 per unit of a tile: where it lies in dy and in x, and its position
  int dy_rows;  // int4 per (channel, row) of dy: offset in memory (64 bits), in the stage, position
  int x_rows;   // the same of x
  int weights;  // where dy is made: fragments, [k step][8 channels][lane] of 8 bytes, or 16 with both of their parts
  int taps;     // an int2 per thread of four and k step: where its two taps lie in x
  int rows;     // a float4 per channel: center, scale and offset of the convolution
  int made;     // a tile of dy
  // Where dx is given: fragments [k step][16 rows][part][lane] of 16 bytes; where a part of a k step lies in dy; an
  // int2 per row of the products; planes of dx.
  int dx_weights, dx_offsets, dx_table, dx_sums;
  int stages;
  int total;
};

KGOPT_HD int few_wgrad_units(const FewWgradPlan& p) { return p.tile[0] * p.tile[1] * (p.dy_pitch / kFewWgradUnit); }
KGOPT_HD int few_wgrad_channels(const FewWgradPlan& p) { return p.dy_tiles * 8 * p.splits; }  // of a block

KGOPT_HD FewWgradLayout few_wgrad_layout(const FewWgradPlan& p) {
  auto align = [](int bytes) { return (bytes + 127) / 128 * 128; };
  FewWgradLayout s{};
  s.units = 0;
  s.dy_rows = s.units + align(few_wgrad_units(p) * 16);
  s.x_rows = s.dy_rows + align(p.dy_copy.slots * 16);
  s.weights = s.x_rows + align(p.x_copy.slots * 16);
  const int channels = few_wgrad_channels(p);
  s.taps = s.weights + (p.makes_dy ? p.k_steps * channels * 32 * conv_split_factor(p.math) : 0);
  s.rows = s.taps + align(p.k_steps * 8 * 4);
  s.dx_weights = s.rows + (p.makes_dy ? align(channels * 16) : 0);
  s.dx_offsets = s.dx_weights + p.dx_k_steps * (kMadeDxRows / 16) * conv_split_factor(p.math) * 512;
  s.dx_table = s.dx_offsets + align(p.dx_k_steps * 8);
  s.dx_sums = s.dx_table + (p.dx_rows > 0 ? kMadeDxRows * 8 : 0);
  s.made = s.dx_sums + align(p.dx_slots * p.dx_slot * 4);
  s.stages = s.made + p.made_bytes;
  const int sums = few_wgrad_floats(p) * 4;  // at the end, over the stages
  s.total = s.stages + (p.stage_bytes * p.stages > sums ? p.stage_bytes * p.stages : sums);
  return s;
}

namespace plan_detail {

// Fills everything that depends on the tile shape. False when it does not fit in shared memory.
inline bool few_wgrad_tile(FewWgradPlan* p, const ConvProblem& q, const DeviceLimits& limits, int d, int h, int64_t w) {
  const int size = q.dtype == Dtype::kFloat32 ? 4 : 2, vector = 16 / size;
  p->tile[0] = d, p->tile[1] = h, p->tile[2] = static_cast<int>(w);
  for (int i = 0; i < 3; ++i) p->tiles[i] = (q.out[i] + p->tile[i] - 1) / p->tile[i];
  for (int i = 0; i < 2; ++i) p->halo[i] = (p->tile[i] - 1) * p->step[i] + (p->kernel[i] - 1) * p->dilation[i] + 1;
  if (p->halo[0] > 1000 || p->halo[1] > 30000) return false;
  // Only what a position inside of dy reads must be there.
  const int64_t last = std::min<int64_t>(w, q.out[2]) - 1 + p->kernel[2] - 1 - p->padding[2];
  p->margin[0] = p->padding[2] > 0 ? vector : 0;
  p->margin[1] = last >= w ? vector : 0;
  // Eight lanes load 64 bytes of each of two neighbouring rows, which must lie in different halves of the banks.
  auto odd_halves = [](int bytes, bool odd) {
    while (bytes % 128 != (odd ? 64 : 0)) bytes += 16;
    return bytes;
  };
  p->dy_pitch = p->tile[2] * size;
  p->dy_channel = odd_halves(d * h * p->dy_pitch, true);
  p->x_pitch = odd_halves((p->margin[0] + p->tile[2] + p->margin[1]) * size, true);
  p->x_plane = odd_halves(p->halo[1] * p->x_pitch, p->kernel[1] % 2 == 1);
  p->x_channel = odd_halves(p->halo[0] * p->x_plane, p->kernel[0] * p->kernel[1] % 2 == 1);
  const int x_bytes = (p->margin[0] + p->tile[2] + p->margin[1]) * size;
  const int64_t dy_row = p->makes_dy ? made_row_elements(q.out[2], size) : q.out[2];
  p->dy_copy = few_copy(dy_row * size, p->dy_pitch, few_wgrad_channels(*p) * d * h, kFewWgradThreads);
  if (p->dx_rows > 0) p->dy_copy.rows = p->dy_copy.slots = p->dy_copy.pieces = 0;  // it is not stored
  p->x_copy = few_copy(q.in[2] * size, x_bytes, static_cast<int>(q.c_in) * p->halo[0] * p->halo[1], kFewWgradThreads);
  // At the end room for one row more.
  const int64_t dy_bytes = int64_t(few_wgrad_channels(*p)) * p->dy_channel + 64;
  const int64_t stage = q.c_in * int64_t(p->x_channel) + std::max(p->dy_pitch, x_bytes) + (p->makes_dy ? 0 : dy_bytes);
  if (stage + dy_bytes > 2 * int64_t(limits.smem_per_block)) return false;
  p->stage_bytes = static_cast<int>((stage + 127) / 128 * 128);
  if (p->makes_dy) p->made_bytes = static_cast<int>((dy_bytes + p->dy_pitch + 127) / 128 * 128);
  p->all_tiles = q.n * p->tiles[0] * p->tiles[1] * p->tiles[2];
  p->smem_bytes = few_wgrad_layout(*p).total;
  return p->smem_bytes <= limits.smem_per_block && p->blocks_per_sm * (p->smem_bytes + 1024) <= limits.smem_per_sm;
}

inline int few_wgrad_unit_values(const ConvProblem& q) { return kFewWgradUnit / (q.dtype == Dtype::kFloat32 ? 4 : 2); }

// Estimated cycles of a multiprocessor for a tile: the slowest of products, shared memory and copies.
inline double few_wgrad_cost(const FewWgradPlan& p, const ConvProblem& q) {
  const int groups = kFewWgradWarps / p.splits;
  const bool split = p.math == ConvMath::kTf32x3;
  const int units = (few_wgrad_units(p) + groups - 1) / groups * groups;
  const double products = units * p.splits * 2.0 * (p.x_tiles * p.dy_tiles * kFewWgradTaps / 2);
  const double mma = products * (split ? 3 : 1) * 8 / 4;
  const double shared = units * p.splits * (p.x_tiles * 6.0 + p.dy_tiles * 4.0 + 1);
  const double dy_rows = double(few_wgrad_channels(p)) * p.tile[0] * p.tile[1];
  const double x_rows = double(q.c_in) * p.halo[0] * p.halo[1];
  const double copies = (dy_rows * p.dy_copy.pieces + x_rows * p.x_copy.pieces) / 32 * 12;
  double made = 0, made_mma = 0;
  if (p.makes_dy) {
    const double strips = units * (few_wgrad_unit_values(q) / 16.0), tiles = few_wgrad_channels(p) / 8.0;
    made = strips * (p.k_steps * (8.0 + (split ? 4 : 2) * tiles) + 8 * tiles);
    made_mma = strips * p.k_steps * tiles * (split ? 3 : 1) * 2;
  }
  double dx = 0, dx_mma = 0;
  if (p.dx_rows > 0) {
    const double of_dx = p.dx_rows * double(p.tile[2] / kMadeDxUnit);
    dx = of_dx * (p.dx_k_steps * (split ? 26.0 : 17.0) + 6.0 * 16);
    dx_mma = of_dx * p.dx_k_steps * 8 * (split ? 3 : 1) * 2;
  }
  // A row begins and ends within sectors of 32 bytes.
  const double memory = (dy_rows * (p.dy_pitch + 32) + x_rows * (p.x_copy.pieces * p.x_copy.piece + 32)) / 18;
  // A block alone has nobody to work while it waits.
  const double waits = split ? 1.2 : 1.0;
  const double all_mma = mma + made_mma + dx_mma;
  return (std::max(std::max(all_mma, memory), shared + copies + made + dx) + 0.2 * (all_mma + copies) + 600) * waits;
}

}  // namespace plan_detail

// Of contiguous tensors at multiples of 16 bytes. `makes_dy`: it is made from x.
inline FewWgradPlan plan_few_wgrad(const ConvProblem& q, const DeviceLimits& limits, bool makes_dy = false) {
  FewWgradPlan p;
  p.makes_dy = makes_dy;
  const auto refuse = refuser(p);
  if (const char* why = few_gradient_refusal(q, limits)) return refuse(why);
  p.math = conv_math(q);
  p.blocks_per_sm = few_wgrad_blocks_per_sm(p.math);
  const int size = q.dtype == Dtype::kFloat32 ? 4 : 2, unit = kFewWgradUnit / size;
  if (q.out[2] * size % 4 != 0 || q.in[2] * size % 4 != 0) return refuse("rows of an odd number of half values");
  for (int i = 0; i < 3; ++i) {
    p.kernel[i] = static_cast<int>(q.kernel[i]);
    p.step[i] = static_cast<int>(q.stride[i]);
    p.dilation[i] = static_cast<int>(q.dilation[i]);
    p.padding[i] = static_cast<int>(q.padding[i]);
  }
  if (p.kernel[2] > kFewWgradTaps) return refuse("a kernel wider than 3");
  if (p.step[2] != 1 || p.dilation[2] != 1) return refuse("a stride or dilation of the width");
  if (p.padding[2] > 1) return refuse("a padding of the width above 1");
  const int64_t rows = q.c_in * q.kernel[0] * q.kernel[1];
  if (rows > kFewWgradMaxRows) return refuse("input channels times taps of depth and height above 40");
  p.rows = static_cast<int>(rows);
  if (makes_dy) p.k_steps = (few_wgrad_quads(p) + 1) / 2;
  // The instances that there are: 72 accumulators a thread, so that two blocks fit into a multiprocessor.
  if (rows <= 24) {
    p.dy_is_a = true, p.x_tiles = rows <= 16 ? 2 : 3, p.dy_tiles = q.c_out <= 16 ? 2 : 4;
  } else if (rows <= 32 && q.c_out > 16 && q.c_out <= 24) {
    p.dy_is_a = false, p.x_tiles = 4, p.dy_tiles = 3;
  } else {
    p.dy_is_a = true, p.x_tiles = rows <= 32 ? 4 : 5, p.dy_tiles = 2;
  }
  const int64_t dy_tiles = (q.c_out + 7) / 8;
  while (p.splits < 4 && p.splits * p.dy_tiles < dy_tiles) p.splits *= 2;
  p.channel_blocks = static_cast<int>((dy_tiles + p.splits * p.dy_tiles - 1) / (p.splits * p.dy_tiles));
  if (p.channel_blocks > 64) return refuse("too many output channels");
  // Offsets within a sample are words of 32 bits.
  double sample = double(std::max(q.c_in, q.c_out)) * size;
  for (int i = 0; i < 3; ++i) sample *= double(std::max(q.in[i], q.out[i]));
  if (sample > 1.6e10) return refuse("a sample of more than 16 GB");
  const int64_t full = (q.out[2] + unit - 1) / unit * unit;
  double best = -1;
  FewWgradPlan chosen;
  for (int64_t w : {full, int64_t(256), int64_t(128), int64_t(64), int64_t(32)}) {
    if (w > full || w > 1024) continue;
    for (int d : {1, 2, 3, 4}) {
      if (d > q.out[0]) break;
      int last = 0;
      for (int parts : {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 18, 21, 25, 32, 42, 64, 128}) {
        const int h = static_cast<int>((q.out[1] + parts - 1) / parts);
        if (h == last || h > 512) continue;
        last = h;
        for (int stages : {3, 2}) {
          p.stages = stages;
          if (!plan_detail::few_wgrad_tile(&p, q, limits, d, h, w)) continue;
          const int64_t capacity = std::max<int64_t>(1, int64_t(limits.sm_count) * p.blocks_per_sm / p.channel_blocks);
          const double cost = std::ceil(double(p.all_tiles) / double(capacity)) * p.blocks_per_sm *
                              plan_detail::few_wgrad_cost(p, q) * (stages == 2 ? 1.05 : 1.0);
          if (best < 0 || cost < best) {
            best = cost;
            chosen = p;
          }
        }
      }
    }
  }
  if (best < 0) return refuse("a tile does not fit in shared memory");
  p = chosen;
  if (p.all_tiles > (int64_t(1) << 31) - 1) return refuse("more than 2^31 tiles");
  p.cycles = best;
  p.blocks = static_cast<int>(std::min<int64_t>(
      p.all_tiles, std::max<int64_t>(1, int64_t(limits.sm_count) * p.blocks_per_sm / p.channel_blocks)));
  p.partial_floats = int64_t(p.channel_blocks) * p.blocks * few_wgrad_floats(p);
  return p;
}

// The same with dx from the same launch: dy is made, and stored nowhere.
inline FewWgradPlan plan_few_wgrad_dx(const ConvProblem& q, const DeviceLimits& limits) {
  FewWgradPlan p = plan_few_wgrad(q, limits, /*makes_dy=*/true);
  const auto refuse = refuser(p);
  if (p.refusal) return p;
  int reach[2];
  for (int i = 0; i < 3; ++i) {
    if (p.step[i] != 1) return refuse("a stride");
    if (i < 2) reach[i] = (p.kernel[i] - 1) * p.dilation[i];
    if (p.padding[i] > (i < 2 ? reach[i] : p.kernel[2] - 1)) return refuse("a padding above the kernel's");
  }
  if (q.c_in * p.kernel[0] * p.kernel[2] > kMadeDxRows) {
    return refuse("input channels times taps of depth and width above 32");
  }
  if (p.channel_blocks > 1) return refuse("more output channels than a block has");
  if (reach[0] >= q.in[0]) return refuse("fewer planes than the kernel reaches over");
  const bool half = q.dtype != Dtype::kFloat32;
  const int pairs = few_wgrad_channels(p) / 8 * p.kernel[1];
  p.dx_k_steps = half ? (pairs + 1) / 2 : pairs;
  p.dx_slots = reach[0] + 1;
  const int64_t width = (q.out[2] + kMadeDxUnit - 1) / kMadeDxUnit * kMadeDxUnit;
  if (width > 1024) return refuse("rows of more than 1024 positions");
  p.dx_pitch = static_cast<int>(width) + 4;
  const int64_t capacity = int64_t(limits.sm_count) * p.blocks_per_sm;
  double best = -1;
  FewWgradPlan chosen;
  int last_rows = 0;
  for (int slabs : {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 18, 21, 25, 32, 42, 64, 128}) {
    const int64_t rows = (q.in[1] + slabs - 1) / slabs;
    if (rows == last_rows || rows > 512) continue;
    last_rows = p.dx_rows = static_cast<int>(rows);
    p.dx_channel = p.dx_rows * p.dx_pitch;
    while (p.dx_channel % 32 != (half ? 8 : 1)) ++p.dx_channel;  // neighbouring channels: other banks
    if (double(p.dx_slots) * double(q.c_in) * p.dx_channel * 4 > limits.smem_per_block) continue;
    p.dx_slot = static_cast<int>(q.c_in) * p.dx_channel;
    for (int stages : {3, 2}) {
      p.stages = stages;
      if (!plan_detail::few_wgrad_tile(&p, q, limits, 1, p.dx_rows + reach[1], width)) continue;
      const double cost = plan_detail::few_wgrad_cost(p, q) * (stages == 2 ? 1.05 : 1.0);
      const int64_t slabs_now = (q.in[1] + rows - 1) / rows;
      for (int parts : {1, 2, 3, 4, 6, 8, 12, 16, 32}) {
        const int64_t planes = (q.in[0] + parts - 1) / parts;
        const int64_t marches = q.n * slabs_now * ((q.in[0] + planes - 1) / planes);
        const double cycles =
            std::ceil(double(marches) / double(capacity)) * p.blocks_per_sm * double(planes + reach[0]) * cost;
        if (best >= 0 && cycles >= best) continue;
        best = cycles;
        chosen = p;
        chosen.dx_planes = static_cast<int>(planes);
        chosen.steps = chosen.dx_planes + reach[0];
        chosen.tiles[0] = (q.in[0] + planes - 1) / planes;
        chosen.tiles[1] = slabs_now;
        chosen.tiles[2] = 1;
        chosen.all_tiles = marches * chosen.steps;
        chosen.blocks = static_cast<int>(std::min(marches, capacity));
      }
    }
  }
  if (best < 0) return refuse("a tile does not fit in shared memory");
  p = chosen;
  if (p.all_tiles > (int64_t(1) << 31) - 1) return refuse("more than 2^31 tiles");
  p.cycles = best;
  p.partial_floats = int64_t(p.blocks) * few_wgrad_floats(p);
  return p;
}

}  // namespace kgopt
