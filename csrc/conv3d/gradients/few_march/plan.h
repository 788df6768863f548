// Host-side planning of both gradients for few input channels behind a norm and a mean: slabs, marches, shared memory.
// Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/gradients/few_march/params.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

namespace plan_detail {

// Fills what depends on the rows of a slab. False where they do not fit.
inline bool few_march_slab(FewMarchPlan* p, const ConvProblem& q, const DeviceLimits& limits, int64_t rows) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  // Planes and octets an odd number of four positions apart lie in different halves of the banks.
  const auto odd_fours = [](int64_t positions) { return static_cast<int>((positions + 3) / 8 * 8 + 4); };
  const int64_t pitch = p->pitch, reach_h = p->kernel[1] - 1, reach_w = p->kernel[2] - 1;
  if ((rows + 2 * reach_h) * pitch > kFewMarchLoads * kFewMarchThreads) return false;
  p->rows = static_cast<int>(rows);
  p->dy_rows = p->rows + p->kernel[1] - 1;
  p->x_rows = p->dy_rows + p->kernel[1] - 1;
  p->dy_tiles = static_cast<int>(up(p->dy_rows * pitch, kFewMarchRows));
  p->dx_tiles = static_cast<int>(up(rows * pitch, kFewMarchRows));
  if (p->dx_tiles > kFewMarchGroups * few_march_dx_tiles(p->terms)) return false;
  // Products read whole tiles, and taps reach further than their positions.
  const int64_t reach = reach_h * pitch + reach_w;
  p->x_plane = odd_fours(p->dy_tiles * int64_t(kFewMarchRows) + 16 + reach);
  p->dy_octet = odd_fours(
      std::max(p->dx_tiles * int64_t(kFewMarchRows) + reach, p->dy_tiles * int64_t(kFewMarchRows) + reach_w + 16));
  p->slabs = up(q.in[1], rows);
  p->smem_bytes = few_march_layout(*p).total;
  return p->smem_bytes <= limits.smem_per_block && 2 * (p->smem_bytes + 1024) <= limits.smem_per_sm;
}

inline void few_march_operands(FewMarchPlan* p) {
  const int taps = p->kernel[1] * p->kernel[2];
  const auto place = [&](int tap) { return tap / p->kernel[2] * p->pitch + tap % p->kernel[2]; };
  const auto operand = [](int from, int to) { return uint32_t(from) | uint32_t(to - from) << 16; };
  for (int i = 0; i < p->plane_steps; ++i) {
    const int from = place(2 * i);
    p->y_operands[i] = operand(from, 2 * i + 1 < taps ? place(2 * i + 1) : from + 1);
  }
  const auto at = [&](int pair) { return pair / taps * p->dy_octet + place(pair % taps); };
  for (int i = 0; i < p->dx_steps; ++i) {
    p->dx_operands[i] = operand(at(2 * i), 2 * i + 1 < p->tiles * taps ? at(2 * i + 1) : at(2 * i) + 1);
  }
}

// Estimated cycles of a multiprocessor for a plane of a slab: shared memory is what bounds it.
inline double few_march_cost(const FewMarchPlan& p) {
  const double terms = p.terms ? 2 : 1;
  const auto by_group = [](int tiles) { return (tiles + kFewMarchGroups - 1) / kFewMarchGroups * kFewMarchGroups; };
  const double y = by_group(p.dy_tiles) * double(p.kernel[0] * p.plane_steps) * (16 + 2.0 * p.tiles * terms);
  const double dx = std::max(by_group(p.dx_tiles), 2 * kFewMarchGroups) * double(p.dx_steps) * (p.terms ? 48 : 20);
  const double steps = double(p.rows) * p.pitch / 8;
  const int pairs = (p.kernel[0] * p.kernel[1] * p.kernel[2] + 1) / 2;
  const double dw = p.terms ? steps / 2 * (4.0 * pairs + 4.0 * p.tiles * std::min(pairs, kFewMarchWarps))
                            : steps * p.halves * (17 + 2.0 * ((p.tiles + 1) / 2));
  const double made = p.dy_tiles * 4.0 * p.tiles * 5 * terms, loads = double(p.x_rows) * p.pitch / 32 * 14;
  return y + dx + dw + made + loads + 2000;  // barriers and waits, measured on an H200
}

}  // namespace plan_detail

// Of contiguous tensors.
inline FewMarchPlan plan_few_march(const ConvProblem& q, const DeviceLimits& limits) {
  FewMarchPlan p;
  const auto refuse = refuser(p);
  if (const char* why = few_gradient_refusal(q, limits)) return refuse(why);
  p.terms = conv_math(q) == ConvMath::kTf32x3;
  if (q.c_in > kFewMarchInputs) return refuse("more than 4 input channels");
  if (q.c_out > 32) return refuse("more than 32 output channels");
  for (int i = 0; i < 3; ++i) {
    if (q.stride[i] != 1) return refuse("a stride");
    if (q.dilation[i] != 1 && q.kernel[i] > 1) return refuse("a dilation");
    if (q.padding[i] > q.kernel[i] - 1) return refuse("a padding above the kernel's");
    if (q.in[i] > (1 << 20)) return refuse("more than 2^20 positions along a side");
    p.kernel[i] = static_cast<int>(q.kernel[i]);
    p.padding[i] = static_cast<int>(q.padding[i]);
  }
  if (q.kernel[0] > kFewMarchDepth) return refuse("more than 3 taps along the depth");
  const int64_t plane_taps = q.kernel[1] * q.kernel[2], taps = q.kernel[0] * plane_taps;
  if (taps > kFewMarchTaps) return refuse("more than 27 taps");
  if (double(q.in[1]) * double(q.in[2]) >= 2147483648.0) return refuse("planes of 2^31 or more positions");
  const int64_t pitch = q.in[2] + 2 * q.padding[2];
  if (pitch > kFewMarchLoads * kFewMarchThreads) return refuse("rows that are too long");
  p.pitch = static_cast<int>(pitch);
  p.inputs = q.c_in > 3 || p.terms ? 4 : 3;
  p.tiles = q.c_out > 24 ? 4 : 3;
  p.plane_steps = static_cast<int>((plane_taps + 1) / 2);
  p.dx_steps = static_cast<int>((p.tiles * plane_taps + 1) / 2);
  p.halves = taps > kFewMarchLeft ? 2 : 1;
  const double capacity = 2.0 * limits.sm_count;
  double best = -1;
  FewMarchPlan chosen;
  for (int64_t rows = 1; rows <= std::min<int64_t>(q.in[1], kFewMarchLoads * kFewMarchThreads); ++rows) {
    const int64_t slabs = (q.in[1] + rows - 1) / rows;
    if ((q.in[1] + slabs - 1) / slabs != rows) continue;  // fewer rows are as good
    if (!plan_detail::few_march_slab(&p, q, limits, rows)) continue;
    const double cost = plan_detail::few_march_cost(p);
    for (int64_t parts : {1, 2, 3, 4, 6, 8, 12, 16, 32}) {
      if (parts > q.in[0]) break;
      p.planes = static_cast<int>((q.in[0] + parts - 1) / parts);
      p.parts = (q.in[0] + p.planes - 1) / p.planes;
      p.marches = q.n * p.slabs * p.parts;
      const double rounds = std::ceil(double(p.marches) / capacity);
      const double cycles = rounds * 2 * ((p.planes + p.kernel[0] - 1) * cost + 3000);
      if (best >= 0 && cycles >= best) continue;
      best = cycles;
      chosen = p;
    }
  }
  if (best < 0) return refuse("two slabs do not fit in shared memory");
  p = chosen;
  if (p.marches > int64_t(1) << 30) return refuse("more than 2^30 marches");
  plan_detail::few_march_operands(&p);
  p.cycles = best;
  p.blocks = static_cast<int>(std::min<int64_t>(p.marches, 2 * int64_t(limits.sm_count)));
  p.partial_floats = int64_t(p.blocks) * few_march_floats(p);
  return p;
}

}  // namespace kgopt
