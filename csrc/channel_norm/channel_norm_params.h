#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

// How a position's C values are scaled: by their root mean square, by their length and the root of C, or after their
// mean is taken off.
enum class ChannelNormKind : int { kRms, kL2, kLayer };

// y = act(xhat * weight + bias) with x [n, c, s] dense, channels_last [n, s, c]; sizes in elements.
// rms: xhat = x / sqrt(mean x^2 + eps); l2: x sqrt(c) / max(|x|, eps); layer: (x - mean) / sqrt(variance + eps).
struct ChannelNormParams {
  const void* x = nullptr;
  const void* dy = nullptr;      // backward: of x's layout
  void* y = nullptr;             // backward: dx
  const void* weight = nullptr;  // [c] or null (ones)
  const void* bias = nullptr;    // [c] or null (zeros)
  Dtype affine_dtype = Dtype::kFloat32, dtype = Dtype::kFloat32;
  int64_t n = 0, c = 0, s = 0;
  bool channels_last = false;
  ChannelNormKind kind = ChannelNormKind::kRms;
  double eps = 0;
  ActChain act;
  // Set by the launcher, from the plan.
  int along = 1;          // contiguous: threads along positions; channels_last: lanes of a position
  int64_t tiles = 0;      // contiguous: tiles of all samples
  int held = 0;           // contiguous forward: vectors of a tile that a thread holds in shared memory
  int ring_bytes = 0;     // and what they take there
  int64_t rows = 0;       // of partial sums
  double floor = 0;       // what no result may fall below: 0 for ReLU, else minus infinity; where no chain is walked
  void* table = nullptr;  // [2][c] of weight and bias in the type of sums; null: each block makes its own
  void* sums = nullptr;   // backward: [2][rows][c] of dz * xhat and of dz, in the type of sums
};

// Their sums over the rows.
struct ChannelNormGradientParams {
  const void* sums = nullptr;
  int64_t rows = 0, c = 0;
  bool is_double = false;
  void* dweight = nullptr;  // [c]
  void* dbias = nullptr;    // [c]
  Dtype affine_dtype = Dtype::kFloat32;
};

}  // namespace kgopt
