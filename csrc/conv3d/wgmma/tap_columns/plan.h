// Host-side planning of the convolution with taps as columns: tile, stages, shared memory. Plain arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/implicit_gemm/plan.h"
#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

// Shared memory in bytes, in the order in which the kernel lays it out, from an address aligned to 1024.
struct TapColumnsSmemLayout {
  int weights;
  int exchange;
  int barriers;
  int total;
};

KGOPT_HD int tap_columns_a_stage_bytes(const TapColumnsPlan& p) {
  return (p.runs * p.boxes * p.box_rows * p.row_bytes + 1023) / 1024 * 1024;
}
KGOPT_HD int tap_columns_b_stage_bytes(const TapColumnsPlan& p) { return p.taps_w * p.c_tile * p.row_bytes; }
KGOPT_HD int tap_columns_rows(const TapColumnsPlan& p) { return kWgmmaConsumers / p.teams * p.segments * 64; }
// Rows that a warp's 16 rows hand to their neighbours: those that a shifted tap reaches.
KGOPT_HD int tap_columns_exchanged_rows(int taps_w, int dilation_w) {
  const int before = taps_w / 2, after = taps_w - 1 - before;
  return (before * (before + 1) + after * (after + 1)) / 2 * dilation_w;
}
KGOPT_HD TapColumnsSmemLayout tap_columns_smem_layout(const TapColumnsPlan& p) {
  TapColumnsSmemLayout s{};
  s.weights = p.teams * p.a_stages * tap_columns_a_stage_bytes(p);
  s.exchange = s.weights + p.b_stages * tap_columns_b_stage_bytes(p);
  s.barriers = s.exchange +
               kWgmmaConsumers * p.segments * 4 * tap_columns_exchanged_rows(p.taps_w, p.dilation[2]) * p.c_tile * 4;
  s.total = s.barriers + ((2 * kWgmmaConsumers + 2) * kTapColumnsMaxStages + 1) * 8 + 1024;  // 1024: alignment
  return s;
}

// Slices of TapColumnsParams::moments, per sample.
KGOPT_HD int tap_columns_moment_slices(const TapColumnsPlan& p) { return p.blocks * kWgmmaConsumers * 4; }

// Estimated cycles in which the two warpgroups do a tile, or one each: their products, or their loads where those take
// longer (the second-level cache gives a multiprocessor about 28 bytes a cycle when all ask), and an epilogue, which
// hides behind the other warpgroup's products where each has its own tiles.
inline double tap_columns_round_cycles(const TapColumnsPlan& p) {
  const double steps = double(p.taps[0]) * p.chunks;
  const double products =
      steps * p.taps[1] * (p.row_bytes / 32) * kWgmmaConsumers * p.segments * p.taps_w * p.c_tile / 2;
  const double a_bytes = steps * p.taps[1] / p.taps_per_stage * p.teams * tap_columns_a_stage_bytes(p);
  const double b_bytes = p.teams > 1 ? 0 : steps * p.taps[1] * tap_columns_b_stage_bytes(p);
  const double main = std::max(products, (a_bytes + b_bytes) / 28);
  const double epilogue = 5000 + (p.math == ConvMath::kTf32 ? 1000 : 0);
  return p.teams > 1 ? std::max(main, products / 2 + epilogue + 3000) : main + epilogue;
}

inline KnownDivisor known_divisor(int64_t divisor) {
  KnownDivisor d;
  while ((int64_t(1) << d.shift) < divisor) ++d.shift;
  d.magic = static_cast<uint32_t>(((uint64_t(1) << (31 + d.shift)) + divisor - 1) / divisor);
  return d;
}

// Column x of a tap's c_tile columns holds this output channel of the tile: a thread then finds 8 neighbouring channels
// in its accumulators of 32 columns (fp32: two times 4, so that neighbouring threads store neighbouring pieces of 16
// bytes).
KGOPT_HD int tap_columns_channel(int x, bool half) {
  const int thread = x % 8 / 2, i = x % 32 / 8 * 2 + x % 2;
  return x / 32 * 32 + (half ? thread * 8 + i : i / 4 * 16 + thread * 4 + i % 4);
}

// Why the kernels on wgmma cannot run a dim, null when they can: each of their taps is a shift of the same stage.
inline const char* shifted_taps_refusal(const ConvProblem& q, int dim) {
  if (q.stride[dim] != 1) return "stride above 1";
  if (q.kernel[dim] > 7) return "kernel above 7";
  const int64_t size = std::max(q.in[dim], q.out[dim]);
  return size > (1 << 20) || q.dilation[dim] > 64 ? "a size or dilation is too large" : nullptr;
}

// The same for channels-innermost tensors; `padding` is that of the equivalent regular convolution.
inline const char* shifted_taps_refusal(const ConvProblem& q, int dim, int* padding) {
  if (const char* why = shifted_taps_refusal(q, dim)) return why;
  const int64_t span = (q.kernel[dim] - 1) * q.dilation[dim];
  const int64_t regular = q.transposed ? span - q.padding[dim] : q.padding[dim];
  if (regular < 0 || regular > span) return "padding beyond the kernel's extent";
  if (q.out[dim] != q.in[dim] + 2 * regular - span) return "output padding";
  *padding = static_cast<int>(regular);
  return nullptr;
}

inline TapColumnsPlan plan_tap_columns(const ConvProblem& problem, const DeviceLimits& limits) {
  TapColumnsPlan p;
  const auto refuse = refuser(p);
  if (problem.is_empty()) return refuse(kEmptyProblem);
  if (!limits.has_wgmma) return refuse("the device or the build has no wgmma");
  if (problem.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  p.math = conv_math(problem);
  if (p.math == ConvMath::kTf32x3) return refuse("fp32 accuracy is not built for wgmma");
  if (!problem.channels_innermost) return refuse("x is not channels_last, or not in whole 16-byte pieces");
  if (problem.groups != 1) return refuse("grouped convolution");
  const int64_t size = dtype_size(problem.dtype);
  if (problem.c_in * size % 16 != 0) return refuse("input channels are no multiple of 16 bytes");
  if (problem.c_out % 8 != 0) return refuse("output channels are no multiple of 8");
  for (int i = 0; i < 3; ++i) {
    if (const char* why = shifted_taps_refusal(problem, i, &p.padding[i])) return refuse(why);
    p.dilation[i] = static_cast<int>(problem.dilation[i]);
  }
  if (problem.in[1] * problem.in[2] >= (int64_t(1) << 30) || problem.out[1] * problem.in[2] >= (int64_t(1) << 30)) {
    return refuse("a plane is too large");
  }
  p.flip = problem.transposed;
  p.taps[0] = static_cast<int>(problem.kernel[0]);
  p.taps[1] = static_cast<int>(problem.kernel[1]);
  p.taps_w = static_cast<int>(problem.kernel[2]);
  if (p.taps_w != 3) return refuse("a kernel width other than 3 is not built");
  if (problem.epilogue != ConvEpilogue::kStore) return refuse("an epilogue other than a store");
  const int64_t channel_bytes = problem.c_in * size;
  p.row_bytes = channel_bytes % 128 != 0 && channel_bytes % 128 <= 64 ? 64 : 128;
  p.chunks = static_cast<int>((channel_bytes + p.row_bytes - 1) / p.row_bytes);

  // Width: taps are added around the middle one, so that few rows cross a warp's edge.
  const int middle = p.taps_w / 2 * p.dilation[2];
  p.first_shift = -middle;
  p.last_shift = (p.taps_w - 1) * p.dilation[2] - middle;
  p.anchor_to_out = p.padding[2] - middle;
  if (p.last_shift > 7 || middle > 7) return refuse("dilation along the width is too large");
  const int64_t right = problem.out[2] - p.anchor_to_out - problem.in[2];  // anchors beyond the input's columns
  if ((p.anchor_to_out > 0 && !(p.anchor_to_out == 1 && p.last_shift == 1)) ||
      (right > 0 && !(right == 1 && p.first_shift == -1))) {
    return refuse("the output is wider than the input by more than a column a side");
  }

  p.wide = p.anchor_to_out > 0 || right > 0;
  p.c_tile = problem.c_out <= 32 && !p.wide ? 32 : 64;
  p.segments = p.c_tile == 32 ? 4 : 2;
  p.n_tiles = static_cast<int>((problem.c_out + p.c_tile - 1) / p.c_tile);
  const int64_t plane = problem.out[1] * problem.in[2];  // anchors, by rows of the input's width
  // False when it does not fit.
  auto use = [&](int teams, int strip_rows, int run_strips) {
    p.teams = teams;
    const int rows = tap_columns_rows(p);
    p.strip_rows = strip_rows;
    p.run_strips = run_strips;
    p.runs = rows / strip_rows / run_strips;
    const bool whole_rows = strip_rows % problem.in[2] == 0;
    p.owned_first = whole_rows ? 0 : middle;
    p.owned_end = whole_rows ? strip_rows : strip_rows - p.last_shift;
    p.strip_step = p.owned_end - p.owned_first;
    const int64_t run_step = int64_t(p.strip_step) * run_strips;
    p.runs_per_plane = static_cast<int>((plane + run_step - 1) / run_step);
    p.tiles_per_sample = static_cast<int>((problem.out[0] * p.runs_per_plane + p.runs - 1) / p.runs);
    // One stage of positions for all taps along the height where it fits, else one for each tap.
    for (p.taps_per_stage = p.taps[1];; p.taps_per_stage = 1) {
      const int64_t need =
          (run_strips - 1) * p.strip_step + strip_rows + (p.taps_per_stage - 1) * p.dilation[1] * problem.in[2];
      p.boxes = static_cast<int>(std::min<int64_t>((need + 255) / 256, 1 << 12));
      p.box_rows = static_cast<int>(((need + p.boxes - 1) / p.boxes + 7) / 8 * 8);
      p.a_stages = p.b_stages = 2;
      if (teams > 1) p.b_stages = p.taps[0] * p.chunks * p.taps[1];
      if (need < 4096 && tap_columns_smem_layout(p).total <= limits.smem_per_block) return true;
      if (p.taps_per_stage == 1) return false;
    }
  };
  // Long runs load fewer rows around them, short ones fit small planes.
  TapColumnsPlan best;
  double least = -1;
  for (int teams = 1; teams <= (p.n_tiles == 1 ? kWgmmaConsumers : 1); ++teams) {
    for (int strip_rows = 64 * p.segments; strip_rows >= 64; strip_rows /= 2) {
      for (int strips = kWgmmaConsumers / teams * p.segments * 64 / strip_rows; strips >= 1; strips /= 2) {
        if (!use(teams, strip_rows, strips)) continue;
        const double cost = tap_columns_round_cycles(p) * p.tiles_per_sample / teams;
        if (least < 0 || cost < least * 0.99) best = p, least = cost;
      }
    }
  }
  if (least < 0) return refuse("a tile does not fit in shared memory");
  p = best;
  p.tiles = problem.n * int64_t(p.tiles_per_sample) * p.n_tiles;
  p.blocks = static_cast<int>(std::min<int64_t>((p.tiles + p.teams - 1) / p.teams, limits.sm_count));
  if (p.tiles >= int64_t(1) << 31 || problem.out[0] * p.runs_per_plane >= int64_t(1) << 30) {
    return refuse("too many tiles");
  }
  auto grow = [&](int* stages, int most) {
    while (*stages < most) {
      ++*stages;
      if (tap_columns_smem_layout(p).total > limits.smem_per_block) {
        --*stages;
        break;
      }
    }
  };
  if (p.teams > 1) {
    grow(&p.a_stages, kTapColumnsMaxStages);
    p.lag = p.taps[0] * p.chunks * p.taps[1] / 2;
  } else {
    grow(&p.a_stages, p.taps_per_stage == 1 ? 4 : 3);
    grow(&p.b_stages, kTapColumnsMaxStages);
    if (p.taps_per_stage == 1) grow(&p.a_stages, kTapColumnsMaxStages);
    // A stage must be free early enough to be full again when the first warpgroup comes to it.
    const double tap_cycles = p.row_bytes / 32 * kWgmmaConsumers * p.segments * p.taps_w * p.c_tile / 2;
    const int load_taps = static_cast<int>((tap_columns_a_stage_bytes(p) / 28 + 1000) / tap_cycles) + 1;
    p.lag = std::max(0, std::min(p.b_stages - 2, p.a_stages * p.taps_per_stage - p.taps_per_stage - load_taps));
  }
  for (int i = 0; i < tap_columns_rows(p) / 64; ++i) {
    const int strip = i * 64 / p.strip_rows, run = strip / p.run_strips, row = i * 64 % p.strip_rows;
    p.segment[i] = {run, strip % p.run_strips * p.strip_step + row, row};
  }
  p.by_n_tiles = known_divisor(p.n_tiles);
  p.by_tiles_per_sample = known_divisor(p.tiles_per_sample);
  p.by_runs_per_plane = known_divisor(p.runs_per_plane);
  p.by_width = known_divisor(problem.in[2]);
  p.smem_bytes = tap_columns_smem_layout(p).total;
  p.packed_bytes = int64_t(p.n_tiles) * p.taps[0] * p.chunks * p.taps[1] * tap_columns_b_stage_bytes(p);
  return p;
}

}  // namespace kgopt
