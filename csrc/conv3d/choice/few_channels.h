// For what numbers of channels a pipeline's convolution may leave its output out. Python asks the extension for the
// table.
#pragma once

#include <cstdint>

namespace kgopt {

// Input channels per group up to which convolutions that store no output, or statistics with it, take the implicit
// GEMM; measured on an H200 (benchmarks/results): below, cuDNN pads channels to its tile and runs at a tenth of its
// rate.
inline constexpr int64_t kFewInputChannels = 16;
inline constexpr int64_t kFewOutputChannels = 64;

// Up to so many input and output channels; any row suffices.
inline constexpr int64_t kFewChannelsTable[][2] = {{kFewInputChannels, INT64_MAX},
                                                   {2 * kFewInputChannels, kFewOutputChannels}};

inline bool has_few_channels(int64_t c_in, int64_t c_out) {
  for (const auto& row : kFewChannelsTable) {
    if (c_in <= row[0] && c_out <= row[1]) return true;
  }
  return false;
}

}  // namespace kgopt
