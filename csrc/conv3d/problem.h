// A convolution as every family's plan sees it, whoever computes it, and what a plan may use of the device. Plain
// numbers: no CUDA, no torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

enum class ConvMath : int {
  kTf32,    // fp32 in, TF32 tensor cores, fp32 accumulation
  kTf32x3,  // fp32 in, each operand split in two TF32 terms: fp32 accuracy
  kBf16,
  kFp16,
  kFp16x3,  // fp32 in, scaled by powers of two, each operand split in two fp16 terms: fp32 accuracy at half the cost
  kFp16x1   // fp32 in, scaled by powers of two to fp16, which has TF32's digits: half of its cost
};

enum class ConvEpilogue : int {
  kStore,       // y = act(conv + bias)
  kStoreStats,  // the same, and per-channel statistics of what is stored
  kStats,       // per-channel statistics of conv + bias, nothing stored
  kResidualLse  // logsumexp over channels of c + hardswish(tanh(GroupNorm(c))), c = conv + bias
};

// What the caller asks for.
struct ConvProblem {
  int64_t n = 0;
  int64_t c_in = 0, c_out = 0;
  int64_t groups = 1;
  int64_t in[3] = {1, 1, 1};
  int64_t out[3] = {1, 1, 1};
  int64_t kernel[3] = {1, 1, 1};
  int64_t stride[3] = {1, 1, 1};
  int64_t padding[3] = {0, 0, 0};
  int64_t dilation[3] = {1, 1, 1};
  bool transposed = false;
  Dtype dtype = Dtype::kFloat32;
  bool allow_tf32 = true;
  ConvEpilogue epilogue = ConvEpilogue::kStore;
  bool channels_innermost = false;  // x has whole 16-byte pieces of channels, rows of the height dense; so has y
  bool planar = false;              // y is contiguous
  int64_t norm_groups = 0;          // of the GroupNorm behind it, where that is to be part of it; else 0

  // Whether a tensor has no elements: what plans divide by may be 0 then, so that each of them refuses first.
  bool is_empty() const {
    bool empty = n < 1 || groups < 1 || c_in < groups || c_out < groups;
    for (int i = 0; i < 3; ++i) empty = empty || in[i] < 1 || out[i] < 1 || kernel[i] < 1;
    return empty;
  }
};
inline constexpr char kEmptyProblem[] = "a tensor has no elements";

// Of a 1 x 1 convolution to a few channels. Below these positions launches are all of the time.
inline constexpr int64_t kHeadLeastRows = 4096;

// What the plan may use of the device.
struct DeviceLimits {
  int sm_count = 132;
  int smem_per_block = 227 * 1024;  // opt-in limit
  int smem_per_sm = 228 * 1024;
  bool has_wgmma = true;    // compute capability 9.0, and code built for sm_90a
  int cluster_blocks = 16;  // that a cluster may have, with all of their shared memory
};

constexpr int conv_split_factor(ConvMath math) {
  return math == ConvMath::kTf32x3 || math == ConvMath::kFp16x3 ? 2 : 1;
}
constexpr int conv_channels_per_word(ConvMath math) {
  return math == ConvMath::kTf32 || math == ConvMath::kTf32x3 ? 1 : 2;
}
constexpr bool conv_is_scaled(ConvMath math) { return math == ConvMath::kFp16x3 || math == ConvMath::kFp16x1; }

// What a problem's products are computed in; fp64 has none.
inline ConvMath conv_math(const ConvProblem& problem) {
  switch (problem.dtype) {
    case Dtype::kBFloat16: return ConvMath::kBf16;
    case Dtype::kFloat16: return ConvMath::kFp16;
    default: return problem.allow_tf32 ? ConvMath::kTf32 : ConvMath::kTf32x3;
  }
}

}  // namespace kgopt
