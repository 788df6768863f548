// Loops over blocks that the compiler vectorizes, built for several x86 levels and picked at load time.
// Float transcendentals are polynomials without branches, within a few ulp; NaN and infinities come out as from libm.
// Everything here is compiled once, in cpu_math.cpp: an inline function built for AVX must not reach other files.
// Sources and targets may be the same array, and may not overlap otherwise.
#pragma once

#include <cstdint>

#include "common/activation.h"

namespace kgopt::cpu {

// Elements that are converted to the accumulation type and worked on at a time: several such blocks fit in L1.
inline constexpr int64_t kBlock = 2048;

template <typename T>
struct Sums {
  T first, second;
};

// to = act(x); to = g * act'(x), and 0 where stops_gradient.
void activate(const ActStep<float>& f, const float* x, float* to, int64_t n);
void activate(const ActStep<double>& f, const double* x, double* to, int64_t n);
void activate_gradient(const ActStep<float>& f, const float* x, const float* g, float* to, int64_t n);
void activate_gradient(const ActStep<double>& f, const double* x, const double* g, double* to, int64_t n);

// T is float or double. A "row" has one set of parameters. "Columns" have their own: n elements beside parameters of
// `width` elements that repeat, which is one position of a channels_last tensor or several.
template <typename T>
struct Loops {
  // Sums of x - shift and of its square.
  static Sums<T> shifted_sums(const T* x, int64_t n, T shift);
  static void shifted_column_sums(const T* x, int64_t n, int64_t width, const T* shift, T* sum, T* sum_sq);
  // y = (x - mean) * scale + bias.
  static void normalize_row(const T* x, T* y, int64_t n, T mean, T scale, T bias);
  static void normalize_columns(const T* x, T* y, int64_t n, int64_t width, const T* mean, const T* scale,
                                const T* bias);
  // Sums of g and of g * (x - mean).
  static Sums<T> gradient_sums(const T* x, const T* g, int64_t n, T mean);
  static void gradient_column_sums(const T* x, const T* g, int64_t n, int64_t width, const T* mean, T* sum, T* sum_x);
  // dx = g * scale + (x - mean) * slope + offset.
  static void gradient_row(const T* x, const T* g, T* dx, int64_t n, T mean, T scale, T slope, T offset);
  static void gradient_columns(const T* x, const T* g, T* dx, int64_t n, int64_t width, const T* mean, const T* scale,
                               const T* slope, const T* offset);
  // y = x where x > 0, else x * slope.
  static void prelu_row(const T* x, T* y, int64_t n, T slope);
  static void prelu_columns(const T* x, T* y, int64_t n, int64_t width, const T* slope);
  // dx = g where x > 0, else g * slope. The sum of g * x over the others, which is the slope's gradient.
  static T prelu_gradient_row(const T* x, const T* g, T* dx, int64_t n, T slope);
  static void prelu_gradient_columns(const T* x, const T* g, T* dx, int64_t n, int64_t width, const T* slope, T* sum);
  // r = c + hardswish(tanh((c - mean) * scale + bias)); for a row also maximum = max(maximum, r), element by element.
  static void residual_row(const T* c, T* r, T* maximum, int64_t n, T mean, T scale, T bias);
  static void residual_columns(const T* c, T* r, int64_t n, int64_t width, const T* mean, const T* scale,
                               const T* bias);
  // sums[r] += the sum of row r of n elements.
  static void row_sums(const T* x, int64_t rows, int64_t n, double* sums);
  // Columns of `rows` rows that are `stride` apart.
  static void column_sums(const T* x, int64_t rows, int64_t stride, int64_t width, T* sum);
  // Largest of n values and a start, NaN passed over; sum of exp(x - shift).
  static T row_maximum(const T* x, int64_t n, T start);
  static T row_exponentials(const T* x, int64_t n, T shift);
  // maximum = max(maximum, x); sum += exp(x - shift).
  static void column_maxima(const T* x, int64_t rows, int64_t stride, int64_t width, T* maximum);
  static void column_exponentials(const T* x, int64_t rows, int64_t stride, int64_t width, const T* shift, T* sum);
  // to = g * exp(x - shift).
  static void row_softmax(const T* x, T* to, int64_t n, T shift, T g);
  static void column_softmax(const T* x, T* to, int64_t rows, int64_t stride, int64_t width, const T* shift,
                             const T* g);
};

// Rounded to nearest even, as the hardware does.
void bf16_to_float(const uint16_t* from, float* to, int64_t n);
void float_to_bf16(const float* from, uint16_t* to, int64_t n);
void half_to_float(const uint16_t* from, float* to, int64_t n);
void float_to_half(const float* from, uint16_t* to, int64_t n);

}  // namespace kgopt::cpu
