// Loops over blocks of floats that the compiler vectorizes, built for several x86 levels and picked at load time.
// Transcendentals are polynomials without branches; NaN and infinities come out as from libm.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "activation.h"

namespace kgopt::cpu {

// Elements that are converted to the accumulation type and worked on at a time: three such blocks fit in L1.
inline constexpr int64_t kBlock = 1024;
inline constexpr int kLanes = 16;  // independent partial sums, as many as the widest vector has floats

// Cody-Waite reduction and a degree-6 polynomial (Cephes); 2 ulp over the whole range, 0 and inf beyond it.
__attribute__((always_inline)) inline float exp_f(float x) {
  const float clamped = x < -104.f ? -104.f : (x > 89.f ? 89.f : x);
  const float n = std::nearbyintf(clamped * 1.44269504088896341f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  // 2^n in two factors: n reaches from -150 to 128, past what one exponent field holds.
  const int32_t whole = n == n ? static_cast<int32_t>(n) : 0;
  const int32_t half = whole / 2;
  const int32_t a_bits = (half + 127) << 23, b_bits = (whole - half + 127) << 23;
  float a, b;
  std::memcpy(&a, &a_bits, 4);
  std::memcpy(&b, &b_bits, 4);
  return p * a * b;
}

// Odd polynomial near 0 (Cephes), 1 - 2 / (exp(2|x|) + 1) elsewhere.
__attribute__((always_inline)) inline float tanh_f(float x) {
  const float ax = std::fabs(x);
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float small = p * z * x + x;
  const float large = std::copysign(1.f - 2.f / (exp_f(2.f * ax) + 1.f), x);
  return ax < 0.625f ? small : (x == x ? large : x);
}

struct Sums {
  float sum, sum_sq;
};

// Sums of x - shift and of its square.
Sums shifted_sums(const float* x, int64_t n, float shift);
// Per-channel sums over `positions` rows of `channels` values.
void shifted_column_sums(const float* x, int64_t positions, int64_t channels, const float* shift, float* sum,
                         float* sum_sq);
// y = (x - mean) * scale + bias, for one channel and for rows of channels.
void normalize_row(const float* x, float* y, int64_t n, float mean, float scale, float bias);
void normalize_columns(const float* x, float* y, int64_t positions, int64_t channels, const float* mean,
                       const float* scale, const float* bias);
// One activation in place.
void activate(Act act, float* x, int64_t n);
inline void activate(Act act, double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = act_value(act, x[i]);
}
template <typename T>
void activate_chain(const ActChain& chain, T* x, int64_t n) {
  for (int i = 0; i < chain.length; ++i) activate(chain.at(i), x, n);
}
// r = c + hardswish(tanh((c - mean) * scale + bias)); maximum = max(maximum, r).
void residual_row(const float* c, float* r, float* maximum, int64_t n, float mean, float scale, float bias);
// sum += exp(r - maximum); with maximum infinite, exp(r).
void add_exponentials(const float* r, const float* maximum, double* sum, int64_t n);
// Largest of n values and a start, NaN passed over; sum of exp(x - shift).
float row_maximum(const float* x, int64_t n, float start);
float row_exponentials(const float* x, int64_t n, float shift);
void bf16_to_float(const uint16_t* from, float* to, int64_t n);
void float_to_bf16(const float* from, uint16_t* to, int64_t n);

}  // namespace kgopt::cpu
