// Host-side planning of statistics from the input's autocorrelation: which convolutions it takes, how samples are
// divided, what it costs. Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/few_channels/autocorrelation/params.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

// Cycles of the kernel behind it, which looks which samples it is to do again.
inline constexpr double kAutocorrelationCheck = 2000;

namespace plan_detail {

// Fills what depends on the number of slices. False where they are too small or their sums do not fit.
inline bool autocorrelation_slices(AutocorrelationPlan* p, const ConvProblem& q, const DeviceLimits& limits,
                                   int64_t slices) {
  const int64_t height = q.in[1], rows = (height + slices - 1) / slices;
  // Outer rows of one side lie in one slice, and those of both sides only where there is one.
  if (slices > 1 && (rows < 4 || (height + rows - 1) / rows != slices || height - (slices - 1) * rows < 2))
    return false;
  p->slices = slices;
  p->slice_rows = static_cast<int>(rows);
  p->edge_rows = slices == 1 ? 4 : 2;
  // As many runs of rows as make whole rounds of the warps.
  const int core = static_cast<int>(std::min<int64_t>(rows, p->core_rows[1] - p->core_rows[0]));
  p->runs = std::min(std::max(1, core / 4), std::max(1, kAutocorrelationWarps / p->chunks));
  p->run_rows = (core + p->runs - 1) / p->runs;
  p->runs = (core + p->run_rows - 1) / p->run_rows;
  p->column_rows = (core + 15) / 16 * 16 + 2;
  p->slice_floats = slices == 1 ? 0 : (p->edge_rows + 1) * kWalkFloats + 2 * kColumnFloats + 4;
  p->finish_smem_bytes = autocorrelation_layout(1, 4, 0).total * 4;
  if (rows > 4096) return false;  // or sizes overflow
  p->smem_bytes = autocorrelation_layout(kAutocorrelationWarps, p->edge_rows, p->column_rows).total * 4;
  return p->smem_bytes <= limits.smem_per_block;
}

// Estimated cycles of all launches, from measurements on an H200.
inline double autocorrelation_cycles(const AutocorrelationPlan& p, const ConvProblem& q, const DeviceLimits& limits) {
  const int size = q.dtype == Dtype::kFloat32 ? 4 : 2;
  const bool vectors = q.in[2] * size % 16 == 0;
  const double waves = std::ceil(double(q.n) * p.slices / limits.sm_count);
  // A warp's row, with the wait for its loads, beside the others' of a multiprocessor.
  const double row = !vectors ? 2700 : size == 4 ? 950 : 750;
  const double rounds = std::ceil(double(p.chunks) * p.runs / kAutocorrelationWarps);
  const double walk = 3000 + row * rounds * (p.run_rows + 2);
  const double finish = 12000 + 5000 * (std::ceil(q.c_out / 64.0) - 1);
  if (p.slices == 1) return 6000 + waves * (walk + finish);
  return 6000 + waves * (walk + 3000) + 4000 + 300 * p.slices + std::ceil(double(q.n) / limits.sm_count) * finish;
}

}  // namespace plan_detail

inline AutocorrelationPlan plan_autocorrelation(const ConvProblem& q, const DeviceLimits& limits) {
  AutocorrelationPlan p;
  const auto refuse = refuser(p);
  if (q.is_empty()) return refuse(kEmptyProblem);
  if (!limits.has_wgmma) return refuse("it needs compute capability 9.0 and code built for sm_90a");
  if (q.epilogue != ConvEpilogue::kStats) return refuse("it gives statistics and nothing else");
  if (!q.planar) return refuse("a channels_last tensor");
  if (q.transposed || q.groups != 1) return refuse("a transposed or grouped convolution");
  if (q.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  if (q.dtype == Dtype::kFloat32 && !q.allow_tf32) return refuse("fp32 accuracy");
  if (q.c_in > kAutocorrelationChannels) return refuse("more than 8 input channels");
  if (q.c_out > kAutocorrelationOutputs) return refuse("more than 256 output channels");
  if (q.in[0] != 1 || q.kernel[0] != 1 || q.padding[0] != 0) return refuse("a depth other than 1");
  if (q.n > int64_t(1) << 26) return refuse("more than 2^26 samples");
  int64_t positions = 1;
  for (int i = 1; i < 3; ++i) {
    if (q.stride[i] != 1 || (q.dilation[i] != 1 && q.kernel[i] > 1)) return refuse("a stride or dilation other than 1");
    if (q.kernel[i] > kAutocorrelationTaps) return refuse("more than 3 taps along a side");
    if (q.padding[i] > 4096) return refuse("padding above 4096");
    if (q.in[i] < 8 || q.out[i] < 8) return refuse("fewer than 8 positions along a side");
    if (q.in[i] > int64_t(1) << 20) return refuse("more than 2^20 positions along a side");
    p.kernel[i - 1] = static_cast<int>(q.kernel[i]);
    p.pad[i - 1] = static_cast<int>(q.padding[i]);
    int (&core)[2] = i == 1 ? p.core_rows : p.core_columns;
    core[0] = static_cast<int>(std::max<int64_t>(i - 1, q.kernel[i] - 1 - q.padding[i]));
    core[1] = static_cast<int>(std::min(q.in[i], q.out[i] - q.padding[i]));
    unsigned (&seen)[kAutocorrelationTaps] = i == 1 ? p.seen_rows : p.seen_columns;
    for (int tap = 0; tap < p.kernel[i - 1]; ++tap) {
      for (int e = 0; e < 4; ++e) {
        const int64_t at = e < 2 ? e : core[1] + e - 2, out = at + q.padding[i] - tap;
        if ((e < 2 ? at < core[0] : at < q.in[i]) && out >= 0 && out < q.out[i]) seen[tap] |= 1u << e;
      }
    }
    positions *= q.in[i];
  }
  if (positions * q.c_in >= int64_t(1) << 31) return refuse("2^31 or more input values in a sample");
  p.math = conv_math(q);
  p.chunks = static_cast<int>((q.in[2] + kAutocorrelationChunk - 1) / kAutocorrelationChunk);
  double best = -1;
  AutocorrelationPlan chosen;
  for (int64_t slices = 1; slices <= kAutocorrelationSlices; ++slices) {
    if (!plan_detail::autocorrelation_slices(&p, q, limits, slices)) continue;
    p.cycles = plan_detail::autocorrelation_cycles(p, q, limits);
    if (best < 0 || p.cycles < best) best = p.cycles, chosen = p;
  }
  if (best < 0) return refuse("its sums do not fit in shared memory");
  return chosen;
}

}  // namespace kgopt
