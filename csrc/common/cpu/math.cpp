#include "common/cpu/math.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The compiler emits one copy per level and a resolver. Elsewhere the baseline is what there is.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KGOPT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KGOPT_MULTIVERSION
#endif
// What a multiversioned function calls must become part of it: on its own it would be built for the baseline.
#define KGOPT_INLINE __attribute__((always_inline)) inline
// Iterations are independent (sums may be split over lanes): no checks for overlapping arrays, no order kept.
#define KGOPT_SIMD _Pragma("omp simd")

namespace kgopt::cpu {
namespace {

KGOPT_INLINE float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
KGOPT_INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// exp(x) = 2^n * (1 + expm1): Cody-Waite reduction, and a polynomial over [-ln 2 / 2, ln 2 / 2].
struct ExpParts {
  int32_t n;
  float expm1;
};
KGOPT_INLINE ExpParts exp_parts(float x) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; a call of nearbyint would not vectorize.
  const float shifted = x * 1.44269504088896341f + 12582912.f;
  const float n = shifted - 12582912.f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9857799649734e-4f;
  p = p * r + 1.3933599699701e-3f;
  p = p * r + 8.3333607763052e-3f;
  p = p * r + 4.1666466742754e-2f;
  p = p * r + 1.6666667163372e-1f;
  p = p * r + 5.0e-1f;
  return {static_cast<int32_t>(as_bits(shifted) - 0x4b400000u), p * r * r + r};
}

// 2 ulp over the whole range, 0 and inf beyond it.
KGOPT_INLINE float exp_value(float x) {
  const ExpParts e = exp_parts(x < -104.f ? -104.f : (x > 89.f ? 89.f : x));
  // 2^n in two factors: n reaches from -150 to 128, past what one exponent field holds.
  const int32_t half = e.n >> 1;
  return (1.f + e.expm1) * as_float((half + 127) << 23) * as_float((e.n - half + 127) << 23);
}
KGOPT_INLINE double exp_value(double x) { return std::exp(x); }

// For x <= 0. One factor serves for 2^n: what falls below the smallest normal number becomes 0.
KGOPT_INLINE float exp_of_negative(float x) {
  const ExpParts e = exp_parts(x < -104.f ? -104.f : x);
  const float power = as_float((e.n < -127 ? 0 : e.n + 127) << 23);
  return power * e.expm1 + power;
}

// For x <= 0, with the digits of a small x kept.
KGOPT_INLINE float expm1_of_negative(float x) {
  const ExpParts e = exp_parts(x < -30.f ? -30.f : x);
  const float power = as_float((e.n + 127) << 23);
  return power * e.expm1 + (power - 1.f);
}

// For 0 <= u <= 1: 2 atanh(u / (2 + u)).
KGOPT_INLINE float log1p_of_fraction(float u) {
  const float s = u / (2.f + u), z = s * s;
  float p = 2.0796583592892e-1f;
  p = p * z + 1.7462219297886e-1f;
  p = p * z + 2.2264951467514e-1f;
  p = p * z + 2.8570297360420e-1f;
  p = p * z + 4.0000009536743e-1f;
  p = p * z + 6.6666668653488e-1f;
  return p * z * s + (s + s);
}

KGOPT_INLINE float tanh_value(float x) {
  const float e = expm1_of_negative(-2.f * std::fabs(x));
  return std::copysign(e / (2.f + e), x);
}
KGOPT_INLINE double tanh_value(double x) { return std::tanh(x); }

KGOPT_INLINE float sigmoid(float x) { return 1.f / (1.f + exp_value(-x)); }

// The tail of the standard normal distribution, Phi(-t), and exp(-t^2 / 2), for t >= 0. Their ratio is smooth: a
// polynomial in (t - 4) / (t + 4), fitted for t <= 14.5 to 1e-7 of Phi(t) and to 3e-6 of the tail itself; beyond that
// the exponential is 0.
struct NormalTail {
  float probability, exponential;
};
KGOPT_INLINE NormalTail normal_tail(float t) {
  const float q = (t - 4.f) / (t + 4.f);
  float p = 7.5346295489e-4f;
  p = p * q + 4.3024975457e-4f;
  p = p * q - 8.5747325793e-3f;
  p = p * q + 3.0866991729e-2f;
  p = p * q - 7.1691378951e-2f;
  p = p * q + 1.2438099831e-1f;
  p = p * q - 1.7039856315e-1f;
  p = p * q + 9.4410546124e-2f;
  const float e = exp_of_negative(-0.5f * t * t);
  return {e * p, e};
}

// sigmoid(z) and its derivative, with the digits of either tail kept.
struct Logistic {
  float value, slope;
};
KGOPT_INLINE Logistic logistic(float z) {
  const float e = exp_of_negative(-std::fabs(z)), inverse = 1.f / (1.f + e), tail = e * inverse;
  return {z < 0.f ? tail : inverse, tail * inverse};
}

// gelu_tanh(x) = x * sigmoid(z(x)): (1 + tanh(u)) / 2 is a sigmoid of 2 u.
KGOPT_INLINE float gelu_tanh_argument(float x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }

// tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2), e = exp(x); it is 1 where x is cut off.
struct MishParts {
  float e, n;
};
KGOPT_INLINE MishParts mish_parts(float x) {
  const float e = exp_value(x > 20.f ? 20.f : x);
  return {e, e * (e + 2.f)};
}

KGOPT_INLINE float softplus_value_of(float z) {
  return (z < 0.f ? 0.f : z) + log1p_of_fraction(exp_of_negative(-std::fabs(z)));
}

template <Act kAct>
KGOPT_INLINE float value(float x, float a, float b) {
  if constexpr (kAct == Act::kSilu) {
    return x / (1.f + exp_value(-x));
  } else if constexpr (kAct == Act::kGelu) {
    // x Phi(x) = max(x, 0) - |x| Phi(-|x|); cut off above, so that infinity stays one.
    const float t = std::fabs(x > 14.5f ? 14.5f : x);
    return (x < 0.f ? 0.f : x) - t * normal_tail(t).probability;
  } else if constexpr (kAct == Act::kGeluTanh) {
    return x * sigmoid(gelu_tanh_argument(x));
  } else if constexpr (kAct == Act::kSigmoid) {
    return sigmoid(x);
  } else if constexpr (kAct == Act::kTanh) {
    return tanh_value(x);
  } else if constexpr (kAct == Act::kElu) {
    const float negative = a * expm1_of_negative(x);
    return x > 0.f ? x * b : negative;
  } else if constexpr (kAct == Act::kCelu) {
    const float negative = a * expm1_of_negative(x * b);
    return x > 0.f ? x : negative;
  } else if constexpr (kAct == Act::kMish) {
    const MishParts m = mish_parts(x);
    return x * (m.n / (m.n + 2.f));
  } else if constexpr (kAct == Act::kSoftplus) {
    return softplus_value_of(x);
  } else if constexpr (kAct == Act::kAnySoftplus) {
    const float z = x * a, any = softplus_value_of(z) / a;
    return z > b ? x : any;
  } else if constexpr (kAct == Act::kLogsigmoid) {
    return (x > 0.f ? 0.f : x) - log1p_of_fraction(exp_of_negative(-std::fabs(x)));
  } else if constexpr (kAct == Act::kTanhshrink) {
    // Of a small x the two would cancel: the series of tanh.
    const float z = x * x, large = x - tanh_value(x);
    const float rest = -0.333329465f + z * (0.133207227f + z * (-0.0526716482f + z * 0.0164372404f));
    return z < 0.3f ? -x * z * rest : large;
  } else {
    return act_value(ActStep<float>{kAct, a, b}, x);
  }
}

template <Act kAct>
KGOPT_INLINE float derivative(float x, float a, float b) {
  if constexpr (kAct == Act::kSilu) {
    const Logistic s = logistic(x);
    return s.value + x * s.slope;
  } else if constexpr (kAct == Act::kGelu) {
    const NormalTail tail = normal_tail(std::fabs(x));
    return (x < 0.f ? tail.probability : 1.f - tail.probability) + x * tail.exponential * 0.39894228040143267794f;
  } else if constexpr (kAct == Act::kGeluTanh) {
    const Logistic s = logistic(gelu_tanh_argument(x));
    return s.value + x * s.slope * (1.5957691216057308f * (1.f + 0.134145f * x * x));
  } else if constexpr (kAct == Act::kSigmoid) {
    return logistic(x).slope;
  } else if constexpr (kAct == Act::kTanh) {
    return 4.f * logistic(2.f * x).slope;
  } else if constexpr (kAct == Act::kElu) {
    const float negative = a * exp_value(x);
    return x > 0.f ? b : negative;
  } else if constexpr (kAct == Act::kCelu) {
    const float negative = a * b * exp_value(x * b);
    return x > 0.f ? 1.f : negative;
  } else if constexpr (kAct == Act::kMish) {
    const MishParts m = mish_parts(x);
    const float inverse = 1.f / (m.n + 2.f);
    const float slope = x > 20.f ? 0.f : 4.f * m.e * (1.f + m.e) * inverse * inverse;
    return m.n * inverse + x * slope;
  } else if constexpr (kAct == Act::kSoftplus) {
    return sigmoid(x);
  } else if constexpr (kAct == Act::kAnySoftplus) {
    const float z = x * a, any = sigmoid(z);
    return z > b ? 1.f : any;
  } else if constexpr (kAct == Act::kLogsigmoid) {
    return sigmoid(-x);
  } else if constexpr (kAct == Act::kTanhshrink) {
    const float t = tanh_value(x);
    return t * t;
  } else {
    return act_derivative(ActStep<float>{kAct, a, b}, x);
  }
}

// g times the slope at x, selected where PyTorch selects: what comes in is not looked at where it goes nowhere, though
// it may be NaN. NaN in x has the slope that PyTorch's vector code gives it.
template <Act kAct, typename T>
KGOPT_INLINE T gradient(T x, T g, T a, T b) {
  if constexpr (kAct == Act::kRelu) {
    return x <= T(0) ? T(0) : g;
  } else if constexpr (kAct == Act::kHardtanh) {
    return x > a && x < b ? g : T(0);
  } else if constexpr (kAct == Act::kClamp) {
    const bool above = x > a || a < lowest<T>(), below = x < b || b > -lowest<T>();
    return above && below ? g : T(0);
  } else if constexpr (kAct == Act::kThreshold) {
    return x <= a ? T(0) : g;
  } else if constexpr (kAct == Act::kHardsigmoid) {
    const T inner = g * (T(1) / T(6));
    return x > T(-3) && x < T(3) ? inner : T(0);
  } else if constexpr (kAct == Act::kSoftshrink || kAct == Act::kHardshrink) {
    return x < -a || x > a ? g : T(0);
  } else if constexpr (kAct == Act::kHardswish) {
    const T inner = g * (x >= T(3) ? T(1) : x / T(3) + T(0.5));
    return x <= T(-3) ? T(0) : inner;
  } else if constexpr (kAct == Act::kElu && sizeof(T) == 8) {
    return g * (x > T(0) ? b : a * std::exp(x));
  } else if constexpr (kAct == Act::kCelu && sizeof(T) == 8) {
    return g * (x > T(0) ? T(1) : a * b * std::exp(x * b));
  } else if constexpr (sizeof(T) == 8) {
    return g * act_derivative(ActStep<T>{kAct, a, b}, x);
  } else {
    return g * derivative<kAct>(x, a, b);
  }
}

template <Act kAct>
KGOPT_INLINE void value_loop(float a, float b, const float* x, float* to, int64_t n) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) to[i] = value<kAct>(x[i], a, b);
}
template <Act kAct, typename T>
KGOPT_INLINE void gradient_loop(T a, T b, const T* x, const T* g, T* to, int64_t n) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) to[i] = gradient<kAct>(x[i], g[i], a, b);
}

template <typename T>
KGOPT_INLINE T residual(T c, T mean, T scale, T bias) {
  const T t = tanh_value((c - mean) * scale + bias);
  return c + t * (t + T(3)) * (T(1) / T(6));  // |tanh| <= 1: hardswish needs no clamp
}

}  // namespace

// clang-format off
#define KGOPT_ACT_CASES(F, ...)                                                                                                    \
  case Act::kRelu: return F<Act::kRelu>(__VA_ARGS__);           case Act::kLeakyRelu: return F<Act::kLeakyRelu>(__VA_ARGS__);      \
  case Act::kSilu: return F<Act::kSilu>(__VA_ARGS__);           case Act::kGelu: return F<Act::kGelu>(__VA_ARGS__);                \
  case Act::kGeluTanh: return F<Act::kGeluTanh>(__VA_ARGS__);   case Act::kSigmoid: return F<Act::kSigmoid>(__VA_ARGS__);          \
  case Act::kTanh: return F<Act::kTanh>(__VA_ARGS__);           case Act::kHardswish: return F<Act::kHardswish>(__VA_ARGS__);      \
  case Act::kHardtanh: return F<Act::kHardtanh>(__VA_ARGS__);   case Act::kElu: return F<Act::kElu>(__VA_ARGS__);                  \
  case Act::kMish: return F<Act::kMish>(__VA_ARGS__);           case Act::kSoftplus: return F<Act::kSoftplus>(__VA_ARGS__);        \
  case Act::kClamp: return F<Act::kClamp>(__VA_ARGS__);         case Act::kAdd: return F<Act::kAdd>(__VA_ARGS__);                  \
  case Act::kMul: return F<Act::kMul>(__VA_ARGS__);             case Act::kCelu: return F<Act::kCelu>(__VA_ARGS__);                \
  case Act::kAnySoftplus: return F<Act::kAnySoftplus>(__VA_ARGS__);case Act::kThreshold: return F<Act::kThreshold>(__VA_ARGS__);   \
  case Act::kHardsigmoid: return F<Act::kHardsigmoid>(__VA_ARGS__);case Act::kLogsigmoid: return F<Act::kLogsigmoid>(__VA_ARGS__); \
  case Act::kSoftsign: return F<Act::kSoftsign>(__VA_ARGS__);   case Act::kTanhshrink: return F<Act::kTanhshrink>(__VA_ARGS__);    \
  case Act::kSoftshrink: return F<Act::kSoftshrink>(__VA_ARGS__);case Act::kHardshrink: return F<Act::kHardshrink>(__VA_ARGS__);   \
  default: return F<Act::kNone>(__VA_ARGS__);
// clang-format on

KGOPT_MULTIVERSION void activate(const ActStep<float>& f, const float* x, float* to, int64_t n) {
  switch (f.act) { KGOPT_ACT_CASES(value_loop, f.a, f.b, x, to, n) }
}
KGOPT_MULTIVERSION void activate_gradient(const ActStep<float>& f, const float* x, const float* g, float* to,
                                          int64_t n) {
  switch (f.act) { KGOPT_ACT_CASES(gradient_loop, f.a, f.b, x, g, to, n) }
}
// In double, libm's functions one by one.
void activate(const ActStep<double>& f, const double* x, double* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = act_value(f, x[i]);
}
void activate_gradient(const ActStep<double>& f, const double* x, const double* g, double* to, int64_t n) {
  switch (f.act) { KGOPT_ACT_CASES(gradient_loop, f.a, f.b, x, g, to, n) }
}

// Four quarters of the array side by side: at least sixteen partial sums at every level, for accuracy, and enough to
// hide the latency of an addition.
template <typename T>
KGOPT_MULTIVERSION Sums<T> Loops<T>::shifted_sums(const T* x, int64_t n, T shift) {
  const int64_t q = n / 4;
  T a = 0, b = 0, c = 0, d = 0, aa = 0, bb = 0, cc = 0, dd = 0;
#pragma omp simd reduction(+ : a, b, c, d, aa, bb, cc, dd)
  for (int64_t i = 0; i < q; ++i) {
    const T va = x[i] - shift, vb = x[i + q] - shift, vc = x[i + 2 * q] - shift, vd = x[i + 3 * q] - shift;
    a += va;
    b += vb;
    c += vc;
    d += vd;
    aa += va * va;
    bb += vb * vb;
    cc += vc * vc;
    dd += vd * vd;
  }
  for (int64_t i = 4 * q; i < n; ++i) {
    const T v = x[i] - shift;
    a += v;
    aa += v * v;
  }
  return {(a + b) + (c + d), (aa + bb) + (cc + dd)};
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::shifted_column_sums(const T* x, int64_t n, int64_t width, const T* shift, T* sum,
                                                      T* sum_sq) {
  for (; n >= 4 * width; n -= 4 * width, x += 4 * width) {
    KGOPT_SIMD for (int64_t c = 0; c < width; ++c) {
      const T v0 = x[c] - shift[c], v1 = x[c + width] - shift[c];
      const T v2 = x[c + 2 * width] - shift[c], v3 = x[c + 3 * width] - shift[c];
      sum[c] += (v0 + v1) + (v2 + v3);
      sum_sq[c] += (v0 * v0 + v1 * v1) + (v2 * v2 + v3 * v3);
    }
  }
  for (; n > 0; n -= width, x += width) {
    const int64_t count = n < width ? n : width;
    KGOPT_SIMD for (int64_t c = 0; c < count; ++c) {
      const T v = x[c] - shift[c];
      sum[c] += v;
      sum_sq[c] += v * v;
    }
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::normalize_row(const T* x, T* y, int64_t n, T mean, T scale, T bias) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale + bias;
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::normalize_columns(const T* x, T* y, int64_t n, int64_t width, const T* mean,
                                                    const T* scale, const T* bias) {
  for (; n > 0; n -= width, x += width, y += width) {
    const int64_t count = n < width ? n : width;
    KGOPT_SIMD for (int64_t c = 0; c < count; ++c) y[c] = (x[c] - mean[c]) * scale[c] + bias[c];
  }
}

template <typename T>
KGOPT_MULTIVERSION Sums<T> Loops<T>::gradient_sums(const T* x, const T* g, int64_t n, T mean) {
  const int64_t q = n / 4;
  T a = 0, b = 0, c = 0, d = 0, ax = 0, bx = 0, cx = 0, dx = 0;
#pragma omp simd reduction(+ : a, b, c, d, ax, bx, cx, dx)
  for (int64_t i = 0; i < q; ++i) {
    a += g[i];
    b += g[i + q];
    c += g[i + 2 * q];
    d += g[i + 3 * q];
    ax += g[i] * (x[i] - mean);
    bx += g[i + q] * (x[i + q] - mean);
    cx += g[i + 2 * q] * (x[i + 2 * q] - mean);
    dx += g[i + 3 * q] * (x[i + 3 * q] - mean);
  }
  for (int64_t i = 4 * q; i < n; ++i) {
    a += g[i];
    ax += g[i] * (x[i] - mean);
  }
  return {(a + b) + (c + d), (ax + bx) + (cx + dx)};
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::gradient_column_sums(const T* x, const T* g, int64_t n, int64_t width, const T* mean,
                                                       T* sum, T* sum_x) {
  for (; n >= 4 * width; n -= 4 * width, x += 4 * width, g += 4 * width) {
    KGOPT_SIMD for (int64_t c = 0; c < width; ++c) {
      const T g0 = g[c], g1 = g[c + width], g2 = g[c + 2 * width], g3 = g[c + 3 * width];
      const T v0 = x[c] - mean[c], v1 = x[c + width] - mean[c];
      const T v2 = x[c + 2 * width] - mean[c], v3 = x[c + 3 * width] - mean[c];
      sum[c] += (g0 + g1) + (g2 + g3);
      sum_x[c] += (g0 * v0 + g1 * v1) + (g2 * v2 + g3 * v3);
    }
  }
  for (; n > 0; n -= width, x += width, g += width) {
    const int64_t count = n < width ? n : width;
    KGOPT_SIMD for (int64_t c = 0; c < count; ++c) {
      sum[c] += g[c];
      sum_x[c] += g[c] * (x[c] - mean[c]);
    }
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::gradient_row(const T* x, const T* g, T* dx, int64_t n, T mean, T scale, T slope,
                                               T offset) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) dx[i] = g[i] * scale + ((x[i] - mean) * slope + offset);
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::gradient_columns(const T* x, const T* g, T* dx, int64_t n, int64_t width,
                                                   const T* mean, const T* scale, const T* slope, const T* offset) {
  for (; n > 0; n -= width, x += width, g += width, dx += width) {
    const int64_t count = n < width ? n : width;
    KGOPT_SIMD for (int64_t c = 0; c < count; ++c) dx[c] = g[c] * scale[c] + ((x[c] - mean[c]) * slope[c] + offset[c]);
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::prelu_row(const T* x, T* y, int64_t n, T slope) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) y[i] = x[i] > T(0) ? x[i] : x[i] * slope;
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::prelu_columns(const T* x, T* y, int64_t n, int64_t width, const T* slope) {
  for (; n > 0; n -= width, x += width, y += width) {
    const int64_t count = n < width ? n : width;
    KGOPT_SIMD for (int64_t c = 0; c < count; ++c) y[c] = x[c] > T(0) ? x[c] : x[c] * slope[c];
  }
}

template <typename T>
KGOPT_MULTIVERSION T Loops<T>::prelu_gradient_row(const T* x, const T* g, T* dx, int64_t n, T slope) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const bool above = x[i] > T(0);
    sum += above ? T(0) : g[i] * x[i];
    dx[i] = above ? g[i] : g[i] * slope;
  }
  return sum;
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::prelu_gradient_columns(const T* x, const T* g, T* dx, int64_t n, int64_t width,
                                                         const T* slope, T* sum) {
  for (; n > 0; n -= width, x += width, g += width, dx += width) {
    const int64_t count = n < width ? n : width;
    KGOPT_SIMD for (int64_t c = 0; c < count; ++c) {
      const bool above = x[c] > T(0);
      sum[c] += above ? T(0) : g[c] * x[c];
      dx[c] = above ? g[c] : g[c] * slope[c];
    }
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::residual_row(const T* c, T* r, T* maximum, int64_t n, T mean, T scale, T bias) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) {
    const T v = residual(c[i], mean, scale, bias);
    r[i] = v;
    maximum[i] = v > maximum[i] ? v : maximum[i];
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::residual_columns(const T* c, T* r, int64_t n, int64_t width, const T* mean,
                                                   const T* scale, const T* bias) {
  for (; n > 0; n -= width, c += width, r += width) {
    const int64_t count = n < width ? n : width;
    KGOPT_SIMD for (int64_t k = 0; k < count; ++k) r[k] = residual(c[k], mean[k], scale[k], bias[k]);
  }
}

// Sixteen rows at a time: sixteen partial sums of each, then across them, which vectorizes over the rows.
template <typename T>
KGOPT_MULTIVERSION void Loops<T>::row_sums(const T* x, int64_t rows, int64_t n, double* sums) {
  constexpr int64_t kLanes = 16;
  T tile[kLanes * kLanes] = {};
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int64_t count = rows - first < kLanes ? rows - first : kLanes;
    for (int64_t r = 0; r < count; ++r, x += n) {
      T lanes[kLanes] = {};
      const int64_t whole = n / kLanes * kLanes;
      for (int64_t i = 0; i < whole; i += kLanes) {
        for (int64_t j = 0; j < kLanes; ++j) lanes[j] += x[i + j];
      }
      for (int64_t j = 0; j < kLanes; ++j) tile[r * kLanes + j] = lanes[j];
      for (int64_t i = whole; i < n; ++i) tile[r * kLanes + i - whole] += x[i];
    }
    T total[kLanes];
    KGOPT_SIMD for (int64_t r = 0; r < kLanes; ++r) {
      const T* const row = tile + r * kLanes;
      const T a = (row[0] + row[1]) + (row[2] + row[3]), b = (row[4] + row[5]) + (row[6] + row[7]);
      const T c = (row[8] + row[9]) + (row[10] + row[11]), d = (row[12] + row[13]) + (row[14] + row[15]);
      total[r] = (a + b) + (c + d);
    }
    for (int64_t r = 0; r < count; ++r) sums[first + r] += total[r];
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::column_sums(const T* x, int64_t rows, int64_t stride, int64_t width, T* sum) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8, x += 8 * stride) {
    KGOPT_SIMD for (int64_t c = 0; c < width; ++c) {
      const T a = (x[c] + x[c + stride]) + (x[c + 2 * stride] + x[c + 3 * stride]);
      const T b = (x[c + 4 * stride] + x[c + 5 * stride]) + (x[c + 6 * stride] + x[c + 7 * stride]);
      sum[c] += a + b;
    }
  }
  for (; r < rows; ++r, x += stride) {
    KGOPT_SIMD for (int64_t c = 0; c < width; ++c) sum[c] += x[c];
  }
}

template <typename T>
KGOPT_MULTIVERSION T Loops<T>::row_maximum(const T* x, int64_t n, T start) {
  T best = start;
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

template <typename T>
KGOPT_MULTIVERSION T Loops<T>::row_exponentials(const T* x, int64_t n, T shift) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp_value(x[i] - shift);
  return sum;
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::column_maxima(const T* x, int64_t rows, int64_t stride, int64_t width, T* maximum) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    KGOPT_SIMD for (int64_t c = 0; c < width; ++c) maximum[c] = x[c] > maximum[c] ? x[c] : maximum[c];
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::column_exponentials(const T* x, int64_t rows, int64_t stride, int64_t width,
                                                      const T* shift, T* sum) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    KGOPT_SIMD for (int64_t c = 0; c < width; ++c) sum[c] += exp_value(x[c] - shift[c]);
  }
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::row_softmax(const T* x, T* to, int64_t n, T shift, T g) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) to[i] = g * exp_value(x[i] - shift);
}

template <typename T>
KGOPT_MULTIVERSION void Loops<T>::column_softmax(const T* x, T* to, int64_t rows, int64_t stride, int64_t width,
                                                 const T* shift, const T* g) {
  for (int64_t r = 0; r < rows; ++r, x += stride, to += stride) {
    KGOPT_SIMD for (int64_t c = 0; c < width; ++c) to[c] = g[c] * exp_value(x[c] - shift[c]);
  }
}

template struct Loops<float>;
template struct Loops<double>;

KGOPT_MULTIVERSION void bf16_to_float(const uint16_t* from, float* to, int64_t n) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) to[i] = as_float(static_cast<uint32_t>(from[i]) << 16);
}

KGOPT_MULTIVERSION void float_to_bf16(const float* from, uint16_t* to, int64_t n) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = as_bits(from[i]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

namespace {

KGOPT_MULTIVERSION void half_to_float_by_bits(const uint16_t* from, float* to, int64_t n) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) {
    const uint32_t h = from[i], sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
    // Subnormal halves: put the fraction below an exponent of -14, and subtract what that adds.
    const uint32_t subnormal = as_bits(as_float(magnitude + (113u << 23)) - as_float(113u << 23));
    const uint32_t normal = magnitude + ((magnitude >= (0x7c00u << 13) ? 224u : 112u) << 23);
    to[i] = as_float(sign | (magnitude < (0x0400u << 13) ? subnormal : normal));
  }
}

KGOPT_MULTIVERSION void float_to_half_by_bits(const float* from, uint16_t* to, int64_t n) {
  KGOPT_SIMD for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = as_bits(from[i]), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the addition rounds: its last bit is a half's smallest step.
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t huge = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    to[i] = static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? huge : finite));
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
// Processors with AVX2 have instructions for it, which compilers do not find in the loops above.
__attribute__((target("avx2,f16c"))) void half_to_float_by_instruction(const uint16_t* from, float* to, int64_t n) {
  for (; n >= 8; n -= 8, from += 8, to += 8) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  for (; n > 0; --n, ++from, ++to) *to = _cvtsh_ss(*from);
}
__attribute__((target("avx2,f16c"))) void float_to_half_by_instruction(const float* from, uint16_t* to, int64_t n) {
  for (; n >= 8; n -= 8, from += 8, to += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
  }
  for (; n > 0; --n, ++from, ++to) *to = _cvtss_sh(*from, _MM_FROUND_TO_NEAREST_INT);
}
const bool has_half_instructions = __builtin_cpu_supports("avx2");
#else
constexpr auto half_to_float_by_instruction = half_to_float_by_bits;
constexpr auto float_to_half_by_instruction = float_to_half_by_bits;
constexpr bool has_half_instructions = false;
#endif

}  // namespace

void half_to_float(const uint16_t* from, float* to, int64_t n) {
  return (has_half_instructions ? half_to_float_by_instruction : half_to_float_by_bits)(from, to, n);
}
void float_to_half(const float* from, uint16_t* to, int64_t n) {
  return (has_half_instructions ? float_to_half_by_instruction : float_to_half_by_bits)(from, to, n);
}

}  // namespace kgopt::cpu
