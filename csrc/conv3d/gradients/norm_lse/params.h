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
inline constexpr int kNormLseThreads = 128 * (kNormLseProducers + kNormLseConsumers);

// Passed by value as a __grid_constant__.
struct ConvNormLseParams {
  // `stored` is the gradient: rows of the width are dense, zeros fill them up to `row` elements.
  FewChannelsParams conv;
  int row;
  const float* dlse;              // [n, positions]
  GroupNormPassesBwdParams norm;  // the first pass writes its partial sums, the second reads its rows
};

// Cycles that a warpgroup takes for a row of 64 positions, beside two others, measured on an H200.
inline constexpr double kNormLseRowCycles = 5000;

// As that of the kernel which stores the convolution, but for the epilogue, which takes longer: three warpgroups
// compute and share the strips of each tile evenly, while one loads the next.
inline FewChannelsPlan plan_conv_norm_lse(ConvProblem q, const DeviceLimits& limits) {
  const auto refuse = refused<FewChannelsPlan>;
  if (q.groups != 1) return refuse("logsumexp over channels needs groups = 1");
  if (q.c_out <= kNormLseColumns / 2 || q.c_out > kNormLseColumns) return refuse("not 33 to 64 output channels");
  const ConvMath math = conv_math(q);
  q.epilogue = ConvEpilogue::kStore;
  q.allow_tf32 = true;
  FewChannelsPlan p = plan_few_channels(q, limits);
  if (p.refusal) return p;
  if (!p.chunked) return refuse("input channels that 16 bytes of a position do not divide");
  p.math = math;  // weights in two parts, where that is 3xTF32
  p.producers = kNormLseProducers, p.consumers = kNormLseConsumers;
  plan_detail::BestTile best{q, limits};
  plan_detail::for_each_tile(
      plan_detail::whole_strips(q.out[2], p.strip, 4096), p.strip, q.out[1], [&](int w, int rows) {
        for (int segments : {1, 2, 3, 6}) {
          if (segments > 1 && (segments - 1) * rows >= q.out[1]) break;
          for (int d : {1, 2, 3, 4, 6}) {
            if (d > q.out[0]) break;
            for (p.stages = kFewChannelsStages; p.stages >= 2; --p.stages) {
              if (!plan_detail::few_channels_tile(&p, q, limits, d, rows, segments, w)) continue;
              const double halo = double(p.halo[0]) * p.halo[1] * p.vectors * 4 * p.words * 4 / 20.0 + 1000;
              const int rounds = ((p.strips + 3) / 4 + p.consumers - 1) / p.consumers;
              const double tile = std::max(rounds * p.rows * kNormLseRowCycles, halo);
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
  NormLsePlans plans{plan_conv_norm_lse(q, limits), plan_few_wgrad(q, limits),
                     plan_few_dgrad(q, limits, /*dy_is_made=*/true)};
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
