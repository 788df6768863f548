// fp32 convolutions on fp16 tensor cores, which have TF32's 11 bits at twice the rate; docs/numerics.md has the errors.
// What fp16 lacks is range. Powers of two bring every input channel below 2^kScaledInputBits and the weights of every
// output channel, times the inputs' powers, to a sum of magnitudes below 2^kScaledWeightBits: outputs stay below 2^15.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/activation.h"
#include "common/padded_shape.h"

namespace kgopt {

// fp16's subnormal spacing is 2^-24. Weights get more room than inputs: their sum is over all taps and channels.
inline constexpr int kScaledInputBits = 4, kScaledWeightBits = 11;
inline constexpr int kScaledMostTaps = 1024;

// x is dense, channels innermost; all buffers are device memory.
struct ScaledHalfParams {
  const float* x = nullptr;  // [n, s, c]
  int64_t n = 0, c = 0, s = 0;
  int sm_count = 0;
  void* partials = nullptr;           // [n, slices, c] of a mean, squared deviations, a count and the range
  float* moments = nullptr;           // [n, c] of (mean, variance)
  float* range = nullptr;             // [n, c] of (least, largest) among the finite values
  const uint32_t* largest = nullptr;  // [c], in place of scale: bits of the largest finite magnitude
  bool keeps_infinities = false;      // of the weight: where the convolution is not cuDNN's
  const float* table = nullptr;  // [n, c] of (mean, rstd, weight, bias), which moments_table_cuda fills; null: no norm
  ActChain act;                  // behind the norm
  float* scale = nullptr;        // [c], of inputs
  double* inverse = nullptr;     // [c], 1 / scale
  // Beside these, where they are asked for: the norm's [n, groups], and the sums of x's channels, [c].
  int64_t groups = 0;
  float *mean = nullptr, *rstd = nullptr, *sums = nullptr;
  void* half_x = nullptr;  // [n, s, c]; with pads [n, pad.out..., c], x's outermost positions repeated around it
  bool pads = false;
  PaddedShape pad;
  const float* weight = nullptr;
  int64_t w_stride_out = 0, w_stride_in = 0, w_stride_k[3] = {};
  int64_t c_out = 0, kernel[3] = {1, 1, 1};
  void* half_weight = nullptr;  // [c_out, kernel..., c]
  // The power of two of an output is one of all that it is a sum of. For the gradient of inputs, which are sums over
  // outputs, the powers are by input and come first, and c_out have `inverse_out`, their gradient's.
  double* powers = nullptr;
  const double* inverse_out = nullptr;
  float* factors = nullptr;  // [c_out, 2], or [c, 2] with powers: by their product a result is too large
};

// Why the activations' largest magnitude over an interval is not known from its ends (largest_magnitude); null where it
// is.
inline const char* scaled_half_act_refusal(const ActChain& act) {
  for (int i = 0; i < act.length; ++i) {
    const ActStep<float> f = act.step<float>(i);
    const bool is_bent =
        f.act == Act::kThreshold || (f.act == Act::kLeakyRelu && f.a < 0.f) ||
        (f.act == Act::kElu && (f.a < 0.f || f.b < 0.f)) ||
        (f.act == Act::kAnySoftplus && (f.a <= 0.f || f.b < 10.f));  // where it becomes a line it falls
    if (is_bent) return "an activation that is not monotonic";
    if (f.act == Act::kTanhshrink) return "tanhshrink, whose digits cancel";
  }
  return nullptr;
}

// Least values of the activations that first fall: silu -0.28, gelu -0.17, hardswish -0.375, mish -0.31.
KGOPT_HD bool has_dip(Act act) {
  return act == Act::kSilu || act == Act::kGelu || act == Act::kGeluTanh || act == Act::kHardswish || act == Act::kMish;
}
inline constexpr float kLargestDip = 0.375f;

// At least the largest magnitude of the chain's values over [low, high]; NaN where both ends give NaN.
KGOPT_HD float largest_magnitude(const ActChain& act, float low, float high) {
  for (int i = 0; i < act.length; ++i) {
    const ActStep<float> f = act.step<float>(i);
    const float a = act_value(f, low), b = act_value(f, high);
    const float dip = has_dip(f.act) && low < 0.f ? fmaxf(-kLargestDip, low) : INFINITY;
    low = fminf(fminf(a, b), dip);
    high = fmaxf(a, b);
  }
  return fmaxf(fabsf(low), fabsf(high));
}

}  // namespace kgopt
