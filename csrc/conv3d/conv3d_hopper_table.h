// Where the Hopper convolution beats cuDNN, measured on an H200: rates of cuDNN (autotuned, channels_last, k3, 3D) in
// TFLOP/s. A shape takes the nearest row; ours is predicted from its plan.
#pragma once

#include <cmath>

#include "conv3d_hopper_plan.h"

namespace kgopt {

struct CudnnRate {
  int c_in, c_out;
  double tf32, half;
};
inline constexpr CudnnRate kCudnnRates[] = {
    {32, 32, 128, 243}, {32, 64, 250, 472}, {64, 64, 230, 453}, {64, 128, 288, 644}, {128, 128, 301, 621},
};
inline constexpr double kHopperCyclesPerMicrosecond = 1700;
inline constexpr double kHopperStartMicroseconds = 8;  // packing, and two launches instead of one

inline double hopper_microseconds(const HopperPlan& p) {
  const double rounds = std::ceil(double(p.tiles) / p.blocks / p.teams);
  return kHopperStartMicroseconds + rounds * hopper_round_cycles(p) / kHopperCyclesPerMicrosecond;
}

inline double cudnn_microseconds(const ConvProblem& q) {
  const CudnnRate* nearest = kCudnnRates;
  double least = 1e30;
  for (const CudnnRate& row : kCudnnRates) {
    const double distance =
        std::abs(std::log(double(q.c_in) / row.c_in)) + std::abs(std::log(double(q.c_out) / row.c_out));
    if (distance < least) least = distance, nearest = &row;
  }
  double products = 2.0 * q.n * q.c_in * q.c_out;
  for (int i = 0; i < 3; ++i) products *= double(q.kernel[i]) * (q.transposed ? q.in[i] : q.out[i]);
  const double rate = q.dtype == Dtype::kFloat32 ? nearest->tf32 : nearest->half;
  // Channels below the nearest row's are padded to it.
  const double used = std::min(1.0, double(q.c_in) / nearest->c_in) * std::min(1.0, double(q.c_out) / nearest->c_out);
  double stats = 0;  // a pass over the output, at 4 TB/s
  if (q.epilogue == ConvEpilogue::kStoreStats) {
    stats = double(q.n) * q.c_out * q.out[0] * q.out[1] * q.out[2] * dtype_size(q.dtype) / 4e6;
  }
  return 3 + products / (rate * used * 1e6) + stats;
}

}  // namespace kgopt
