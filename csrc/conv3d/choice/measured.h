// How long a plain convolution takes by each path: measured at some shapes, and from there by what the plans predict.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "conv3d/few_channels/plan.h"
#include "conv3d/wgmma/cost.h"

namespace kgopt {

enum ConvTimed { kTimedAten, kTimedImplicitGemm, kTimedTapColumns, kTimedPositionRows, kTimedFewChannels, kTimedPaths };

inline constexpr double kOwnMargin = 0.92;       // of cuDNN's time: what an own kernel must stay below to be taken
inline constexpr double kGroupedMargin = 0.7;    // the same of several groups, for which cuDNN has kernels of all kinds
inline constexpr double kPredictedMargin = 0.5;  // the same where both times are predictions

inline double own_margin(const ConvProblem& q) { return q.groups == 1 ? kOwnMargin : kGroupedMargin; }

// One measured convolution.
struct ConvMeasured {
  int math;     // 0: TF32, 1: fp32 accuracy, 2: half types
  bool planar;  // contiguous tensors, else channels_last
  bool transposed;
  int n, c_in, c_out, groups;
  int in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
  float us[kTimedPaths];  // microseconds by each path, 0 where it cannot run
};

// On an H200, by benchmarks/conv_table.py, which writes the file.
inline constexpr ConvMeasured kConvMeasured[] = {
#include "conv3d/choice/measured_rows.inc"
};

inline int conv_math_kind(const ConvProblem& q) { return q.dtype != Dtype::kFloat32 ? 2 : q.allow_tf32 ? 0 : 1; }

inline ConvProblem measured_problem(const ConvMeasured& row) {
  ConvProblem q;
  q.n = row.n;
  q.c_in = row.c_in;
  q.c_out = row.c_out;
  q.groups = row.groups;
  for (int i = 0; i < 3; ++i) {
    q.in[i] = row.in[i];
    q.out[i] = row.out[i];
    q.kernel[i] = row.kernel[i];
    q.stride[i] = row.stride[i];
    q.padding[i] = row.padding[i];
    q.dilation[i] = row.dilation[i];
  }
  q.transposed = row.transposed;
  q.dtype = row.math == 2 ? Dtype::kBFloat16 : Dtype::kFloat32;
  q.allow_tf32 = row.math == 0;
  q.planar = row.planar;
  q.channels_innermost = !row.planar && row.c_in * dtype_size(q.dtype) % 16 == 0;
  return q;
}

// What is predicted, in microseconds; 0 where a path cannot run. Only ratios of two shapes count.
struct ConvPrediction {
  double us[kTimedPaths] = {};
};

// What takes cuDNN and the implicit GEMM their time: a start, the length of a sum, which one block works through,
// memory and products.
struct ConvWork {
  double sum, megabytes, products;

  explicit ConvWork(const ConvProblem& q) {
    auto up = [](int64_t value, int64_t step) { return double((value + step - 1) / step * step); };
    const int64_t c_in = q.c_in / q.groups, c_out = q.c_out / q.groups, size = dtype_size(q.dtype);
    double taps = 1, positions = double(q.n), x = double(q.n) * q.c_in, y = double(q.n) * q.c_out;
    sum = double(c_in);
    for (int i = 0; i < 3; ++i) {
      taps *= double(q.kernel[i]);
      sum *= double(q.kernel[i]) / (q.transposed ? q.stride[i] : 1);
      positions *= double(q.transposed ? q.in[i] : q.out[i]);
      x *= double(q.in[i]);
      y *= double(q.out[i]);
    }
    megabytes = (x + y) * size * 1e-6;
    products = 2e-9 * positions * taps * up(c_in, 128 / size) * up(c_out, 64) * q.groups;
  }
};

// cuDNN's microseconds, fitted to the rows above (within a factor of 1.6 for nine in ten).
inline double predict_aten(const ConvProblem& q) {
  const ConvWork work(q);
  constexpr double kProducts[3] = {2.3, 13, 1.1};  // microseconds for 10^9
  // cuDNN's transposes and padding
  const double passes = (q.planar ? 0.8 : 0) + (q.c_in * int64_t(dtype_size(q.dtype)) % 16 != 0 ? 1.5 : 0);
  return 14 + 3e-3 * work.sum + (0.2 + passes) * work.megabytes + kProducts[conv_math_kind(q)] * work.products;
}

// All paths' microseconds: of the kernels on wgmma from their plans, the implicit GEMM's fitted like cuDNN's.
inline ConvPrediction predict_conv(const ConvProblem& q, const DeviceLimits& limits, const ImplicitGemmPlan& plan,
                                   const TapColumnsPlan& tap_columns, const PositionRowsPlan& position_rows,
                                   const FewChannelsPlan& few_channels) {
  ConvPrediction t;
  const ConvWork work(q);
  t.us[kTimedAten] = predict_aten(q);
  if (!plan.refusal) {
    const double blocks =
        double(q.n) * plan.slices * plan.n_tiles * q.groups * plan.classes[0] * plan.classes[1] * plan.classes[2];
    const double cycles = plan_cost(plan) / plan.tiles_per_sample * plan.tiles_per_slice * blocks;
    t.us[kTimedImplicitGemm] = 12 + 20e-3 * work.sum + 0.8 * work.megabytes +
                               2.2 * cycles / std::min<double>(blocks, limits.sm_count) / kCyclesPerMicrosecond;
  }
  if (!tap_columns.refusal) t.us[kTimedTapColumns] = tap_columns_microseconds(tap_columns);
  if (!position_rows.refusal) t.us[kTimedPositionRows] = position_rows_microseconds(position_rows);
  // No launch ahead of it; the estimate of its cycles was two thirds of what it took.
  if (!few_channels.refusal) t.us[kTimedFewChannels] = 4 + 1.5 * few_channels.cycles / kCyclesPerMicrosecond;
  return t;
}

// PyTorch leaves a transposed convolution whose output padding reaches the stride to kernels of its own: a product and
// a scatter for every sample and group. Their microseconds, fitted to twelve such on an H200; 0 where cuDNN does it.
inline double padded_aten_microseconds(const ConvProblem& q) {
  bool padded = false;
  double columns = double(q.c_out) / q.groups;
  for (int i = 0; i < 3; ++i) {
    const int64_t least = (q.in[i] - 1) * q.stride[i] - 2 * q.padding[i] + q.dilation[i] * (q.kernel[i] - 1) + 1;
    padded = padded || q.out[i] - least >= q.stride[i];
    columns *= double(q.in[i]) * q.kernel[i];
  }
  return q.transposed && padded ? double(q.n) * q.groups * (12 + 28e-6 * columns) : 0;
}

// How far a measured convolution is from another one; below 0 when it says nothing about it.
inline double conv_distance(const ConvProblem& q, const ConvMeasured& row) {
  if (row.math != conv_math_kind(q) || row.planar != q.planar || row.transposed != q.transposed) return -1;
  auto apart = [](double a, double b) { return std::abs(std::log2(a / b)); };
  double positions = double(q.n) / row.n, taps = 1, stride = 1;
  double d = 0;
  for (int i = 0; i < 3; ++i) {
    positions *= double(q.out[i]) / row.out[i];
    taps *= double(q.kernel[i]) / row.kernel[i];
    stride *= double(q.stride[i]) / row.stride[i];
    if ((q.kernel[i] == 1) != (row.kernel[i] == 1)) d += 1;
    if ((q.dilation[i] == 1) != (row.dilation[i] == 1)) d += 0.5;
  }
  d += 2 * apart(double(q.c_in) / q.groups, double(row.c_in) / row.groups);
  d += 1.5 * apart(double(q.c_out) / q.groups, double(row.c_out) / row.groups);
  d += 0.5 * apart(q.groups, row.groups) + ((q.groups == 1) != (row.groups == 1) ? 2 : 0);
  d += std::abs(std::log2(positions)) + std::abs(std::log2(taps)) + 2 * std::abs(std::log2(stride));
  const int64_t size = dtype_size(q.dtype);
  if ((q.c_in * size % 16 == 0) != (row.c_in * size % 16 == 0)) d += 2;
  return d;
}

// By the nearest row: what it measured, times what is predicted for the one shape over the other. The next ones,
// at up to twice its distance, have a say, too: a kernel's time over cuDNN's is the worst that any of them gives. All
// zero where the nearest is far; an own kernel's is zero where no row has it. Rows nearer than `least` do not count, so
// that a test can ask what is estimated of a measured convolution without its own row.
inline ConvPrediction estimate_conv(const ConvProblem& q, const DeviceLimits& limits, const ConvPrediction& predicted,
                                    double least = 0) {
  constexpr size_t kRows = 8;
  // cuDNN's kernels of several groups differ more from shape to shape, and few transposed ones were measured.
  const double far = q.groups == 1 ? 6 : q.transposed ? 1.5 : 4;
  auto still_near = [](double distance, double nearest) { return distance <= 2 * nearest + 0.5; };
  std::vector<std::pair<double, const ConvMeasured*>> near;
  for (const ConvMeasured& row : kConvMeasured) {
    const double distance = conv_distance(q, row);
    if (distance >= least && still_near(distance, far)) near.push_back({distance, &row});
  }
  std::sort(near.begin(), near.end());
  ConvPrediction t;
  if (near.empty() || near[0].first > far) return t;
  double ratios[kTimedPaths] = {};
  for (size_t i = 0; i < std::min(kRows, near.size()) && still_near(near[i].first, near[0].first); ++i) {
    const ConvMeasured& row = *near[i].second;
    const ConvProblem there = measured_problem(row);
    const ConvPrediction expected =
        predict_conv(there, limits, plan_implicit_gemm(there, limits), plan_tap_columns(there, limits),
                     plan_position_rows(there, limits), plan_few_channels(there, limits));
    double us[kTimedPaths] = {};
    for (int path = 0; path < kTimedPaths; ++path) {
      if (expected.us[path] > 0) us[path] = row.us[path] * predicted.us[path] / expected.us[path];
      ratios[path] = std::max(ratios[path], us[path] / us[kTimedAten]);
    }
    if (i == 0) t.us[kTimedAten] = us[kTimedAten];
  }
  for (int path = kTimedAten + 1; path < kTimedPaths; ++path) t.us[path] = ratios[path] * t.us[kTimedAten];
  return t;
}

}  // namespace kgopt
