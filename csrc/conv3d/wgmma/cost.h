// Predicted times: of the kernels for channels-innermost tensors from their plans, within 8 % of what was measured; of
// cuDNN (autotuned, channels_last, kernel 3 x 3 x 3) from its rates on an H200 in TFLOP/s, of the nearest row.
#pragma once

#include <cmath>

#include "conv3d/wgmma/position_rows/plan.h"
#include "conv3d/wgmma/tap_columns/plan.h"

namespace kgopt {

struct CudnnRate {
  int c_in, c_out;
  double tf32, half;
};
inline constexpr CudnnRate kCudnnRates[] = {
    {16, 32, 31, 60},  // of the implicit GEMM, which such channels would take
    {32, 32, 128, 243}, {32, 64, 250, 472}, {64, 64, 230, 453}, {64, 128, 288, 644}, {128, 128, 301, 621},
};
inline constexpr double kCudnnFp32Rate = 24;  // TFLOP/s without TF32
inline constexpr double kCyclesPerMicrosecond = 1700;
inline constexpr double kWgmmaStartMicroseconds = 12;  // packing, launches, and the first tile's loads

inline double tap_columns_microseconds(const TapColumnsPlan& p) {
  const double rounds = std::ceil(double(p.tiles) / p.blocks / p.teams);
  return kWgmmaStartMicroseconds + rounds * tap_columns_round_cycles(p) / kCyclesPerMicrosecond;
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

inline double position_rows_microseconds(const PositionRowsPlan& p) {
  const double rounds = std::ceil(double(p.tiles) / p.blocks);
  const double copy = p.parts == 2 ? 4 + 1.5 * p.copy_bytes / 3e6 : 0;
  return kWgmmaStartMicroseconds + copy + rounds * position_rows_tile_cycles(p) / kCyclesPerMicrosecond;
}

}  // namespace kgopt
