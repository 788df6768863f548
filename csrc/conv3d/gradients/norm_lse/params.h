// The gradient of a convolution's output behind GroupNorm, tanh, hardswish, the residual and logsumexp over channels,
// from the convolution's input: its launch plan and its arguments.
#pragma once

#include <algorithm>
#include <vector>

#include "conv3d/few_channels/params.h"
#include "conv3d/few_channels/plan.h"
#include "conv3d/gradients/few_dgrad/plan.h"
#include "conv3d/gradients/few_wgrad/plan.h"
#include "groupnorm/params.h"

namespace kgopt {

inline constexpr int kNormLseColumns = 64;  // channels, all of them in one block
inline constexpr int kNormLseProducers = 1, kNormLseConsumers = 3;
// K steps whose fragments have registers beside those of a second term.
inline constexpr int kNormLseGroup = 3;
inline constexpr int kNormLseThreads = 128 * (kNormLseProducers + kNormLseConsumers);

// The first pass, and two kinds of the second: dy in memory, or its products for dx and dweight.
enum class NormLsePass { kSums, kStore, kGradients };

// dx from dy while that is in registers: of kernels of up to three rows and columns, which count as 3 x 3, and up to
// eight input channels. A strip of `rows` by 16 positions reaches two rows and columns further in dx. What is another
// strip's there goes to a frame in memory, which a kernel of its own adds to that strip's part. The latter waits in dx
// or, of half types, unrounded in a second part of the frame. Parts are two rows, then two columns of the other rows,
// of eight channels a position.
inline constexpr int kNormLseBorderThreads = 256;
inline constexpr int kNormLseTaps = 3, kNormLseDxChannels = 8;
inline constexpr int kNormLseDxColumns = kNormLseTaps * kNormLseTaps * kNormLseDxChannels;
inline constexpr int kNormLseReach = kFewChannelsStrip + kNormLseTaps - 1;  // columns of dx
// Positions: where the columns begin in a part, where the second part begins, and of both.
inline constexpr int kNormLseFrameColumns = 2 * kNormLseReach;
KGOPT_HD constexpr int norm_lse_own_frame(int rows) { return kNormLseFrameColumns + 2 * rows; }
KGOPT_HD constexpr int norm_lse_frame(int rows, bool has_own) {
  return norm_lse_own_frame(rows) + (has_own ? norm_lse_own_frame(rows + 2) : 0);
}
// Steps of K, which are all of the output channels, and bytes of the weights.
KGOPT_HD constexpr int norm_lse_dx_steps(ConvMath math) { return kNormLseColumns / 8 / conv_channels_per_word(math); }
KGOPT_HD constexpr int norm_lse_dx_weight_bytes(ConvMath math) {
  return norm_lse_dx_steps(math) * kNormLseDxColumns * 8 * 4 * conv_split_factor(math);
}

// What a lane carries from row to row, in shared memory: of two rows of dx [tap of the width][one of two
// positions][one of two channels].
inline constexpr int kNormLseDxRow = kNormLseTaps * 4;
KGOPT_HD constexpr int norm_lse_dx_bytes(ConvMath math) {
  return norm_lse_dx_weight_bytes(math) + 128 * kNormLseConsumers * 2 * kNormLseDxRow * 4;
}

// dweight from dy while that is in registers, of the same convolutions as dx: what the products read of shared memory,
// in bytes, of a warpgroup.
// 8 channels of 64 positions, and all of them.
inline constexpr int kNormLseDyBlock = 64 * 16, kNormLseDyBytes = 8 * kNormLseDyBlock;
inline constexpr int kNormLseBarrier = 3;      // the first of the warpgroups' barriers, behind the loaders'
inline constexpr int kNormLseOnesBytes = 256;  // eight columns of ones, for dbias
KGOPT_HD constexpr int norm_lse_operand_bytes(ConvMath math) { return kNormLseDyBytes * conv_split_factor(math); }
KGOPT_HD constexpr int norm_lse_dweight_bytes(ConvMath math) {
  return kNormLseOnesBytes + kNormLseConsumers * norm_lse_operand_bytes(math);
}
// A warpgroup's sums: [tap and input channel, then four parts of dbias][64 output channels]. Of the kernel that adds up
// those of all, neighbours that a block sums, and threads that share one.
inline constexpr int kNormLseBiasRows = 4;
inline constexpr int kNormLseDweightFloats = (kNormLseDxColumns + kNormLseBiasRows) * kNormLseColumns;
inline constexpr int kNormLseSumLanes = 32, kNormLseSumShares = 16;

struct NormLseDweight {
  float* partials;   // [blocks of the second pass][warpgroup][kNormLseDweightFloats]
  void *dw, *dbias;  // either may be null
  int64_t stride_out, stride_in, stride[2];
  Dtype dtype;
};

// Rows of the width are dense in dx. Frames lie as [n, depth, strips across, strips down], each strip's at its first
// row of dy times frame_row, so that nothing is divided; in positions of eight fp32 values.
struct NormLseDx {
  void* dx;  // null: it is made elsewhere
  float* frames;
  int64_t stride_n, frame_n;
  int stride_c, stride[2];
  int frame_row, frame_column, frame_depth;  // from row to row, to the next strip across, to the next depth
  bool pairs;                                // two positions that begin at an even one of the strips are aligned
};

// Passed by value as a __grid_constant__.
struct ConvNormLseParams {
  // `stored` is the gradient: rows of the width are dense, zeros fill them up to `row` elements.
  FewChannelsParams conv;
  int row;
  const float* dlse;  // [n, positions]
  // Of each position, what the first pass leaves for the second: minus the shift of its exponentials, in powers of 2,
  // and dlse over their sum.
  float* shares;
  void* sizes;  // of scaled values, of each slice of the first pass, a float2 for the scales of the second
  GroupNormPassesBwdParams norm;  // the first pass writes its partial sums, the second reads its rows
  NormLseDx dx;                   // of the second pass
  NormLseDweight dweight;         // of the second pass that stores nothing
};

// Strips of dy down and across a plane, and positions of dx that the borders' kernel looks at.
KGOPT_HD int norm_lse_strips_h(const FewChannelsParams& p) { return (p.out[1] + p.plan.rows - 1) / p.plan.rows; }
KGOPT_HD int norm_lse_strips_w(const FewChannelsParams& p) {
  return (p.out[2] + kFewChannelsStrip - 1) / kFewChannelsStrip;
}
KGOPT_HD int norm_lse_shared_positions(const FewChannelsParams& p) {
  return (norm_lse_strips_h(p) - 1) * 2 * p.in[2] + p.in[1] * (norm_lse_strips_w(p) - 1) * 2;
}
inline void place_norm_lse_frames(const FewChannelsParams& p, NormLseDx* dx) {
  const bool is_half = p.plan.math == ConvMath::kBf16 || p.plan.math == ConvMath::kFp16;
  const int rows = p.plan.rows, frame = norm_lse_frame(rows, is_half);
  dx->frame_row = (frame + rows - 1) / rows;
  dx->frame_column = norm_lse_strips_h(p) * rows * dx->frame_row;
  dx->frame_depth = norm_lse_strips_w(p) * dx->frame_column;
  dx->frame_n = int64_t(p.out[0]) * dx->frame_depth;
}

// Cycles that a warpgroup takes for a row of 64 positions, beside two others, measured on an H200.
inline constexpr double kNormLseRowCycles = 5000, kNormLseDxCycles = 700;  // the latter estimated, for dx on top

// Where the weights for dx begin in shared memory, in bytes.
KGOPT_HD int norm_lse_dx_smem(const FewChannelsPlan& p) {
  return (few_channels_smem_layout(p).total * 4 + 127) / 128 * 128;
}

// As that of the kernel which stores the convolution, but for the epilogue, which takes longer: three warpgroups
// compute and share the strips of each tile evenly, while one loads the next.
// The second pass with makes_dx wants high strips, whose frames are small, and counts on warpgroups that go on with the
// next tile's strips.
inline FewChannelsPlan plan_conv_norm_lse(ConvProblem q, const DeviceLimits& limits, bool makes_dx = false) {
  const auto refuse = refused<FewChannelsPlan>;
  if (q.is_empty()) return refuse(kEmptyProblem);
  if (q.groups != 1) return refuse("logsumexp over channels needs groups = 1");
  if (q.c_out <= kNormLseColumns / 2 || q.c_out > kNormLseColumns) return refuse("not 33 to 64 output channels");
  if (makes_dx) {
    for (int i = 0; i < 3; ++i) {
      if (q.stride[i] != 1) return refuse("a stride");
      if (q.kernel[i] > (i == 0 ? 1 : kNormLseTaps))
        return refuse("a kernel deeper than 1 or of more than 3 rows or columns");
      if (q.dilation[i] != 1 && q.kernel[i] > 1) return refuse("a dilation");
    }
    if (q.padding[0] != 0) return refuse("a padding of the depth");
    if (q.c_in > kNormLseDxChannels) return refuse("more than 8 input channels");
    const double strips = double(q.out[1]) * double(q.out[2] + kFewChannelsStrip - 1);
    if (double(q.in[0]) * std::max(double(q.in[1]) * double(q.in[2]), strips) > 2e7) {
      return refuse("more than 2 * 10^7 positions, which 32 bits of an offset in frames bound");
    }
  }
  const ConvMath math = conv_math(q) == ConvMath::kTf32x3 ? ConvMath::kFp16x3
                        : conv_math(q) == ConvMath::kTf32 ? ConvMath::kFp16x1
                                                          : conv_math(q);
  ConvProblem of_words = q;
  of_words.epilogue = q.epilogue = ConvEpilogue::kStore;
  if (conv_is_scaled(math)) of_words.dtype = Dtype::kFloat16;
  FewChannelsPlan p = plan_few_channels(of_words, limits);
  if (p.refusal) return p;
  p.math = math;
  if (conv_is_scaled(math)) {  // what fills up a chunk of eight channels is zero
    p.words = (p.words + 3) / 4 * 4;
    p.k_words = p.words * p.kernel[0] * p.kernel[1] * p.kernel[2];
    p.chunked = true, p.taps_fast = false, p.large_batch = false;
    p.batch = few_channels_batch(math, 1, p.large_batch);
    p.k_steps = ((p.k_words + 7) / 8 + p.batch - 1) / p.batch * p.batch;
    p.zero_plane = false;
  }
  if (!p.chunked) return refuse("input channels that 16 bytes of a position do not divide");
  p.producers = kNormLseProducers, p.consumers = kNormLseConsumers;
  plan_detail::BestTile best{q, limits};
  plan_detail::for_each_tile(
      plan_detail::whole_strips(q.out[2], p.strip, 4096), p.strip, q.out[1], [&](int w, int rows) {
        for (int segments : {1, 2, 3, 6}) {
          if (segments > 1 && (segments - 1) * rows >= q.out[1]) break;
          if (makes_dx && rows < 4 && rows < q.out[1]) break;
          for (int d : {1, 2, 3, 4, 6}) {
            if (d > q.out[0]) break;
            for (p.stages = kFewChannelsStages; p.stages >= 2; --p.stages) {
              if (!plan_detail::few_channels_tile(&p, q, limits, d, rows, segments, w)) continue;
              const double halo = double(p.halo[0]) * p.halo[1] * p.vectors * 4 * p.words * 4 / 20.0 + 1000;
              const int jobs = (p.strips + 3) / 4;
              double rounds = (jobs + p.consumers - 1) / p.consumers, row = kNormLseRowCycles, frames = 0;
              if (makes_dx) {
                p.smem_bytes = norm_lse_dx_smem(p) + norm_lse_dx_bytes(math) + norm_lse_dweight_bytes(math);
                if (p.smem_bytes > limits.smem_per_block) continue;
                if (jobs * (p.stages - 1) >= p.consumers) rounds = double(jobs) / p.consumers;
                row += kNormLseDxCycles;
                // Written and read.
                frames = double(p.strips) * norm_lse_frame(p.rows, q.dtype != Dtype::kFloat32) * 8 * 4 * 2 / 20;
              }
              const double tile = std::max(rounds * p.rows * row, halo) + frames;
              best.offer(p, double(p.tiles_per_sample) * (tile + (p.stages > 2 ? 0.1 : 0.3) * halo + 300));
            }
          }
        }
      });
  if (!best.fits) return refuse("no tile with its halo and weights fits");
  return best.plan;
}

// Plans of all the passes. The gradient of all samples is stored between them, in rows of made_row_elements, which both
// products copy in whole pieces.
struct NormLsePlans {
  FewChannelsPlan norm;
  FewChannelsPlan fused;  // of the second pass where it makes dx, and dweight; its refusal is none of the whole
  FewWgradPlan dweight;
  FewDgradPlan dx;

  // mask: which of dx, dweight and dbias are wanted.
  const char* refusal(const std::vector<bool>& mask) const {
    if (norm.refusal) return norm.refusal;
    if ((mask[1] || mask[2]) && dweight.refusal) return dweight.refusal;
    return mask[0] ? dx.refusal : nullptr;
  }
};

inline NormLsePlans plan_norm_lse(const ConvProblem& q, const DeviceLimits& limits) {
  NormLsePlans plans{plan_conv_norm_lse(q, limits), plan_conv_norm_lse(q, limits, /*makes_dx=*/true),
                     plan_few_wgrad(q, limits), plan_few_dgrad(q, limits, /*dy_is_made=*/true)};
  FewWgradPlan p = plans.dweight;
  if (p.refusal) return plans;
  const int size = q.dtype == Dtype::kFloat32 ? 4 : 2;
  p.dy_copy = few_copy(made_row_elements(q.out[2], size) * size, p.dy_pitch,
                       few_wgrad_channels(p) * p.tile[0] * p.tile[1], kFewWgradThreads);
  p.smem_bytes = few_wgrad_layout(p).total;
  if (p.smem_bytes <= limits.smem_per_block && p.blocks_per_sm * (p.smem_bytes + 1024) <= limits.smem_per_sm) {
    plans.dweight = p;
  }
  return plans;
}

}  // namespace kgopt
