// Host-side planning of the weight gradient: tile, stages, split of the positions. Plain arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/gradients/wgrad/params.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

KGOPT_HD int wgrad_row_bytes(const WgradPlan& p) { return kWgradChannels * (p.math == ConvMath::kTf32 ? 4 : 2); }
// Positions of a row of `moved` in shared memory before its second run. At stride 2 the first run has the columns of
// the first and the third tap, the second one those of the middle tap; a run begins at a multiple of 8.
KGOPT_HD int wgrad_first_run(const WgradPlan& p) { return p.width + (p.taps[2] - 1) / p.stride; }
KGOPT_HD int wgrad_second_run(const WgradPlan& p) { return (wgrad_first_run(p) + 7) / 8 * 8; }
KGOPT_HD int wgrad_moved_bytes(const WgradPlan& p) {
  return (((p.rows - 1) * p.stride + p.taps[1]) * p.pitch + 1023) / 1024 * 1024;
}
KGOPT_HD int wgrad_still_bytes(const WgradPlan& p) { return p.rows * p.width * wgrad_row_bytes(p); }
KGOPT_HD int wgrad_smem_bytes(const WgradPlan& p) {
  return p.stages * wgrad_moved_bytes(p) + (p.stages + p.back) * wgrad_still_bytes(p) + 2 * kWgradMaxStages * 8 + 1024;
}
// Elements of one partial sum, and of a row of it.
KGOPT_HD int wgrad_columns(const WgradPlan& p) { return p.few ? kWgradFewColumns : p.b_blocks * 8; }
KGOPT_HD int wgrad_tile_floats(const WgradPlan& p) {
  return (p.alternate ? 1 : kWgradGroups) * p.taps[1] * (p.few ? 1 : p.taps[2]) * kWgradChannels * wgrad_columns(p);
}

inline int wgrad_blocks(const WgradPlan& p) { return p.depth_tiles * p.a_tiles * p.b_tiles * p.splits; }

// Estimated cycles of a block's plane of a tile: the products of a step of K, of all warps, at the rate of mma.sync, or
// its loads where these take longer (about 16 bytes a cycle from memory, more where blocks share what they read).
inline double wgrad_step_cycles(const WgradPlan& p) {
  const double step = p.math == ConvMath::kTf32 ? 8 : 16;
  const int products = kWgradGroups * 2 * (p.few ? 2 : p.b_blocks * p.taps[2]);
  double cycles = p.width / step * p.rows * p.taps[1] * products / (p.alternate ? kWgradGroups : 1) / p.depth_stride;
  // Per product; with one tap of depth, and more so at stride 2, loads from shared memory serve fewer of them.
  cycles *= p.stride == 2 ? 3.05 : p.alternate ? 2 : 1.65;
  const double bytes = wgrad_moved_bytes(p) + double(wgrad_still_bytes(p)) / p.depth_stride;
  return std::max(cycles, bytes / (16 * std::min(2, p.depth_tiles * p.a_tiles * p.b_tiles)));
}

inline WgradPlan plan_wgrad(const ConvProblem& problem, const DeviceLimits& limits, int force_rows = 0,
                            int force_width = 0, int force_stages = 0) {
  WgradPlan p;
  const auto refuse = refuser(p);
  if (problem.is_empty()) return refuse(kEmptyProblem);
  if (!limits.has_wgmma) return refuse("the device or the build has no tensor copies");
  if (problem.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  p.math = conv_math(problem);
  if (p.math == ConvMath::kTf32x3) return refuse("fp32 accuracy is not built for the weight gradient");
  if (problem.groups != 1) return refuse("grouped convolution");
  const int64_t size = dtype_size(problem.dtype);
  const bool few = !problem.transposed && problem.c_in * problem.kernel[2] <= kWgradFewColumns;
  if (few) {
    if (problem.c_out * size % 16 != 0) return refuse("output channels are no multiple of 16 bytes");
    if (problem.c_in * problem.in[2] * size % 16 != 0)
      return refuse("rows of few channels are no multiple of 16 bytes");
  } else {
    if (!problem.channels_innermost) return refuse("x is not channels_last, or not in whole 16-byte pieces");
    if (problem.c_in * size % 16 != 0 || problem.c_out * size % 16 != 0) {
      return refuse("channels are no multiple of 16 bytes");
    }
  }
  const int64_t* const still = problem.transposed ? problem.in : problem.out;
  const int64_t* const moved = problem.transposed ? problem.out : problem.in;
  for (int i = 0; i < 3; ++i) {
    if (problem.stride[i] > 2) return refuse("stride above 2");
    if (problem.dilation[i] != 1 && problem.kernel[i] > 1) return refuse("dilation above 1");
    if (still[i] > (1 << 20) || moved[i] > (1 << 20)) return refuse("a size is too large");
    if (problem.kernel[i] > 64 || problem.padding[i] > 64) return refuse("a kernel or padding is too large");
    p.taps[i] = static_cast<int>(problem.kernel[i]);
    p.padding[i] = static_cast<int>(problem.padding[i]);
  }
  if (p.taps[1] != 3 || p.taps[2] != 3) return refuse("a kernel height or width other than 3 is not built");
  const int64_t a = problem.transposed ? problem.c_in : problem.c_out;
  const int64_t b = problem.transposed ? problem.c_out : problem.c_in;
  p.a_tiles = static_cast<int>((a + kWgradChannels - 1) / kWgradChannels);
  p.b_tiles = static_cast<int>((b + kWgradChannels - 1) / kWgradChannels);
  p.alternate = p.taps[0] == 1;
  p.depth_tiles = p.alternate ? 1 : (p.taps[0] + kWgradGroups - 1) / kWgradGroups;
  p.back = std::min(p.taps[0], kWgradGroups) - 1;

  if (problem.stride[1] != problem.stride[2]) return refuse("stride of height and width differ");
  p.stride = static_cast<int>(problem.stride[1]);
  p.depth_stride = static_cast<int>(problem.stride[0]);
  // At stride 2 neighbouring columns are loaded as one position of twice the channels.
  if (!few && p.stride == 2 && moved[2] % 2 != 0) return refuse("stride 2 over an odd width");

  p.few = few ? static_cast<int>(b) : 0;
  p.b_blocks = few || b <= 8 ? 1 : b <= 16 ? 2 : kWgradWarps;
  p.turns = kWgradWarps / p.b_blocks * (p.alternate ? kWgradGroups : 1);
  // Warps that take planes in turn need as many of them at a time.
  const int fewest = p.turns > 1 && p.stride == 1 ? 4 : 2, most = p.turns > 1 ? kWgradMaxStages : 4;

  // The tile that covers the plane with the least waste, halo counted at a third of what products cost.
  WgradPlan best;
  double least = -1;
  for (int rows : {4, 8}) {
    for (int width = 16; width <= 128; width += 16) {
      if ((force_rows && rows != force_rows) || (force_width && width != force_width)) continue;
      p.rows = rows;
      p.width = width;
      if (few) {
        const int align = static_cast<int>(16 / size);
        p.row_skip = (align - p.padding[2] * p.few % align) % align;
        p.row_numbers = (p.row_skip + ((width - 1) * p.stride + p.taps[2]) * p.few + align - 1) / align * align;
        if (p.row_numbers > 256) continue;
        // Columns that are no tap read on into what comes next.
        const int read = p.row_skip + (width - 1) * p.stride * p.few + kWgradFewColumns;
        p.pitch = static_cast<int>(std::max(p.row_numbers, read) * size + 127) / 128 * 128;
      } else {
        p.pitch = (wgrad_second_run(p) + (p.stride == 2 ? width : 0)) * wgrad_row_bytes(p);
      }
      p.tiles[0] = static_cast<int>((still[1] + rows - 1) / rows);
      p.tiles[1] = static_cast<int>((still[2] + width - 1) / width);
      p.stages = force_stages ? force_stages : fewest;
      if (wgrad_smem_bytes(p) > limits.smem_per_block) continue;
      const double halo =
          double((rows - 1) * p.stride + p.taps[1]) * ((width - 1) * p.stride + p.taps[2]) / (rows * width);
      const double cost = double(p.tiles[0]) * p.tiles[1] * (rows * width * (1 + 0.1 * halo) + 16);
      if (least < 0 || cost < least) best = p, least = cost;
    }
  }
  if (least < 0) return refuse("a tile does not fit in shared memory");
  p = best;
  while (!force_stages && p.stages < most) {
    ++p.stages;
    if (wgrad_smem_bytes(p) <= limits.smem_per_block) continue;
    --p.stages;
    break;
  }
  p.steps = problem.n * p.tiles[0] * p.tiles[1] * moved[0];
  if (p.steps >= int64_t(1) << 31) return refuse("too many tiles");
  p.sm_count = limits.sm_count;
  const int64_t jobs = int64_t(p.depth_tiles) * p.a_tiles * p.b_tiles;
  p.splits = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(limits.sm_count / jobs, p.steps / 4)));
  p.slots = p.splits * p.turns;
  p.partial_floats = jobs * p.slots * wgrad_tile_floats(p);
  p.smem_bytes = wgrad_smem_bytes(p);
  return p;
}

inline constexpr int64_t kSplitChain = 1024;              // positions of a partial sum of large terms
inline constexpr int64_t kSplitPartialFloats = 32 << 20;  // of a launch
inline constexpr int64_t kSplitTermBytes = 128 << 20;     // of samples that are split at a time, if more than one

inline void set_wgrad_splits(WgradPlan* p, int64_t splits) {
  p->splits = static_cast<int>(splits);
  p->slots = p->splits * p->turns;
  p->partial_floats = int64_t(p->depth_tiles) * p->a_tiles * p->b_tiles * p->slots * wgrad_tile_floats(*p);
}

// The weight gradient of fp16 terms with about `chain` positions in a partial sum; 0: with as few sums as blocks.
inline WgradPlan plan_wgrad_terms(const ConvProblem& problem, const DeviceLimits& limits, int64_t samples,
                                  int64_t chain = 0) {
  ConvProblem half = problem;
  half.dtype = Dtype::kFloat16;
  half.n = samples;
  half.channels_innermost = true;
  WgradPlan p = plan_wgrad(half, limits);
  if (p.refusal || chain == 0) return p;
  const int64_t per_split = std::max<int64_t>(1, chain * p.turns / (int64_t(p.rows) * p.width));
  set_wgrad_splits(&p, std::max<int64_t>(p.splits, p.steps / per_split));
  return p;
}

// In how many launches the partial sums have little memory, and one of them.
inline int64_t wgrad_portions(const WgradPlan& whole) {
  return std::min<int64_t>(whole.splits, (whole.partial_floats + kSplitPartialFloats - 1) / kSplitPartialFloats);
}
inline WgradPlan wgrad_portion(const WgradPlan& whole, int64_t index, int64_t portions) {
  WgradPlan p = whole;
  p.first_step = whole.steps * index / portions;
  p.steps = whole.steps * (index + 1) / portions - p.first_step;
  set_wgrad_splits(&p, (whole.splits + portions - 1) / portions);
  return p;
}

inline SplitWgradPlan plan_split_wgrad(const ConvProblem& problem, const DeviceLimits& limits) {
  SplitWgradPlan p;
  if (problem.dtype != Dtype::kFloat32 || problem.allow_tf32) {
    p.refusal = "fp32 accuracy was not asked for";
    return p;
  }
  const WgradPlan whole = plan_wgrad_terms(problem, limits, problem.n);
  p.refusal = whole.refusal ? whole.refusal : whole.few > 0 ? "few input channels" : nullptr;
  if (p.refusal) return p;
  int64_t x = problem.c_in, y = problem.c_out;
  for (int i = 0; i < 3; ++i) x *= problem.in[i], y *= problem.out[i];
  const int64_t most = std::max<int64_t>(1, kSplitTermBytes / (4 * (x + y)));
  const int64_t parts = (problem.n + most - 1) / most;
  p.samples = (problem.n + parts - 1) / parts;
  return p;
}

}  // namespace kgopt
