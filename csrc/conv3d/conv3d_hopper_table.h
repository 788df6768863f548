// Where the Hopper convolution beats cuDNN: measured rates of cuDNN (autotuned, channels_last, kernel 3 x 3 x 3) on an
// H200 in TFLOP/s. A shape takes the nearest row; ours is predicted from its plan, within 8 % of what was measured.
// Taken only for channels and kernels as in the rows; 2D and other kernels were not measured.
#pragma once

#include <cmath>

#include "conv3d_hopper_plan.h"
#include "conv3d_rows_plan.h"

namespace kgopt {

struct CudnnRate {
  int c_in, c_out;
  double tf32, half;
};
inline constexpr CudnnRate kCudnnRates[] = {
    {16, 32, 31, 60},  // of the implicit GEMM, which such channels would take
    {32, 32, 128, 243}, {32, 64, 250, 472}, {64, 64, 230, 453}, {64, 128, 288, 644}, {128, 128, 301, 621},
};
inline constexpr double kHopperCyclesPerMicrosecond = 1700;
inline constexpr double kHopperStartMicroseconds = 12;  // packing, launches, and the first tile's loads

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
  // Output channels below the nearest row's are padded to it.
  return 3 + products / (rate * std::min(1.0, double(q.c_out) / nearest->c_out) * 1e6);
}

inline double rows_microseconds(const RowsPlan& p) {
  const double rounds = std::ceil(double(p.tiles) / p.blocks);
  return kHopperStartMicroseconds + rounds * rows_tile_cycles(p) / kHopperCyclesPerMicrosecond;
}

// Null where one of the two kernels for channels-innermost tensors is to be taken, else why not.
inline const char* innermost_loses(const ConvProblem& q, const HopperPlan& hopper, const RowsPlan& rows) {
  if (hopper.refusal && rows.refusal) return hopper.refusal;
  if (q.epilogue != ConvEpilogue::kStore) return "statistics in its epilogue cost more than a pass of their own";
  if (q.c_in < 16 || q.c_in > 128 || q.c_out < 32 || q.c_out > 128 || q.kernel[0] != 3 || q.kernel[1] != 3 ||
      q.kernel[2] != 3) {
    return "only 3D kernels of 3 x 3 x 3 with 16 to 128 input and 32 to 128 output channels were measured";
  }
  const double ours =
      std::min(hopper.refusal ? 1e30 : hopper_microseconds(hopper), rows.refusal ? 1e30 : rows_microseconds(rows));
  return ours < 0.97 * cudnn_microseconds(q) ? nullptr : "cuDNN is predicted to be faster";
}

}  // namespace kgopt
