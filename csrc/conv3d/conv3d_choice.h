// How long a plain convolution takes by each path: measured at some shapes, and from there by what the plans predict.
#pragma once

#include <cmath>
#include <cstdint>

#include "conv3d_hopper_table.h"

namespace kgopt {

enum ConvTimed { kTimedAten, kTimedImplicitGemm, kTimedHopper, kTimedRows, kTimedPaths };

inline constexpr double kOwnMargin = 0.95;  // of cuDNN's time: what an own kernel must stay below to be taken

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
#include "conv3d_choice_rows.inc"
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

// The Hopper kernels' from their plans; cuDNN's and the implicit GEMM's as a start, the length of a sum, which one
// block works through, memory and products, fitted to the rows above (within a factor of 1.6 for nine in ten).
inline ConvPrediction predict_conv(const ConvProblem& q, const DeviceLimits& limits, const ConvPlan& plan,
                                   const HopperPlan& hopper, const RowsPlan& rows) {
  ConvPrediction t;
  auto up = [](int64_t value, int64_t step) { return double((value + step - 1) / step * step); };
  const int64_t c_in = q.c_in / q.groups, c_out = q.c_out / q.groups, size = dtype_size(q.dtype);
  double sum = double(c_in), taps = 1, positions = double(q.n), x = double(q.n) * q.c_in, y = double(q.n) * q.c_out;
  for (int i = 0; i < 3; ++i) {
    taps *= double(q.kernel[i]);
    sum *= double(q.kernel[i]) / (q.transposed ? q.stride[i] : 1);
    positions *= double(q.transposed ? q.in[i] : q.out[i]);
    x *= double(q.in[i]);
    y *= double(q.out[i]);
  }
  const double megabytes = (x + y) * size * 1e-6;
  const double products = 2e-9 * positions * taps * up(c_in, 128 / size) * up(c_out, 64) * q.groups;
  constexpr double kProducts[3] = {2.3, 13, 1.1};                                    // microseconds for 10^9
  const double passes = (q.planar ? 0.8 : 0) + (q.c_in * size % 16 != 0 ? 1.5 : 0);  // cuDNN's transposes and padding
  t.us[kTimedAten] = 14 + 3e-3 * sum + (0.2 + passes) * megabytes + kProducts[conv_math_kind(q)] * products;
  if (!plan.refusal) {
    const double blocks =
        double(q.n) * plan.slices * plan.n_tiles * q.groups * plan.classes[0] * plan.classes[1] * plan.classes[2];
    const double cycles = plan_cost(plan) / plan.tiles_per_sample * plan.tiles_per_slice * blocks;
    t.us[kTimedImplicitGemm] = 12 + 20e-3 * sum + 0.8 * megabytes +
                               2.2 * cycles / std::min<double>(blocks, limits.sm_count) / kHopperCyclesPerMicrosecond;
  }
  if (!hopper.refusal) t.us[kTimedHopper] = hopper_microseconds(hopper);
  if (!rows.refusal) t.us[kTimedRows] = rows_microseconds(rows);
  return t;
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
  d += apart(double(q.c_in) / q.groups, double(row.c_in) / row.groups);
  d += apart(double(q.c_out) / q.groups, double(row.c_out) / row.groups);
  d += 0.5 * apart(q.groups, row.groups) + ((q.groups == 1) != (row.groups == 1) ? 2 : 0);
  d += 0.5 * std::abs(std::log2(positions)) + std::abs(std::log2(taps)) + 2 * std::abs(std::log2(stride));
  const int64_t size = dtype_size(q.dtype);
  if ((q.c_in * size % 16 == 0) != (row.c_in * size % 16 == 0)) d += 2;
  return d;
}

// By the nearest row: what it measured, times what the plans say of the two shapes. All zero without one.
inline ConvPrediction estimate_conv(const ConvProblem& q, const DeviceLimits& limits, const ConvPrediction& predicted) {
  const ConvMeasured* nearest = nullptr;
  double least = 0;
  for (const ConvMeasured& row : kConvMeasured) {
    const double distance = conv_distance(q, row);
    if (distance >= 0 && (!nearest || distance < least)) nearest = &row, least = distance;
  }
  ConvPrediction t;
  if (!nearest) return t;
  const ConvProblem there = measured_problem(*nearest);
  const ConvPrediction expected =
      predict_conv(there, limits, plan_conv(there, limits), plan_hopper(there, limits), plan_rows(there, limits));
  for (int i = 0; i < kTimedPaths; ++i) {
    if (nearest->us[i] > 0 && expected.us[i] > 0) t.us[i] = nearest->us[i] * predicted.us[i] / expected.us[i];
  }
  return t;
}

}  // namespace kgopt
