// Blocks of a tensor in the accumulation type: float for float, bf16 and half, double for double.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "cpu_math.h"
#include "torch_utils.h"

namespace kgopt::cpu {

using BFloat16 = torch::headeronly::BFloat16;
using Half = torch::headeronly::Half;

template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename T>
using acc_t = typename AccOf<T>::type;

template <typename T>
inline void load_block(const T* from, acc_t<T>* to, int64_t n) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    bf16_to_float(reinterpret_cast<const uint16_t*>(from), to, n);
  } else if constexpr (std::is_same_v<T, Half>) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
  } else {
    std::memcpy(to, from, n * sizeof(T));
  }
}

template <typename T>
inline void store_block(const acc_t<T>* from, T* to, int64_t n) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    float_to_bf16(from, reinterpret_cast<uint16_t*>(to), n);
  } else if constexpr (std::is_same_v<T, Half>) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Half>(from[i]);
  } else {
    std::memcpy(to, from, n * sizeof(T));
  }
}

// Runs f(T()) with the element type of a checked tensor.
template <typename F>
inline void dispatch_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32: f(float()); break;
    case Dtype::kFloat64: f(double()); break;
    case Dtype::kBFloat16: f(BFloat16()); break;
    case Dtype::kFloat16: f(Half()); break;
  }
}

inline double read_as_double(const Tensor& t, int64_t i) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return static_cast<const float*>(t.const_data_ptr())[i];
    case ScalarType::Double: return static_cast<const double*>(t.const_data_ptr())[i];
    case ScalarType::Half: return static_cast<const Half*>(t.const_data_ptr())[i];
    default: return static_cast<const BFloat16*>(t.const_data_ptr())[i];
  }
}

inline void write_double(const Tensor& t, int64_t i, double v) {
  switch (t.scalar_type()) {
    case ScalarType::Float: static_cast<float*>(t.mutable_data_ptr())[i] = static_cast<float>(v); break;
    case ScalarType::Double: static_cast<double*>(t.mutable_data_ptr())[i] = v; break;
    case ScalarType::Half: static_cast<Half*>(t.mutable_data_ptr())[i] = static_cast<float>(v); break;
    default: static_cast<BFloat16*>(t.mutable_data_ptr())[i] = static_cast<float>(v);
  }
}

// Values of a small vector ([C] parameters, [N, G] statistics) in double; `missing` where there is no tensor.
inline std::vector<double> read_all(const OptTensor& t, int64_t n, double missing = 0) {
  std::vector<double> v(n, missing);
  if (t) {
    const Tensor dense = dense_in(*t, MemoryFormat::Contiguous);
    for (int64_t i = 0; i < n; ++i) v[i] = read_as_double(dense, i);
  }
  return v;
}

// Moments of a set of values; merged as Chan, Golub and LeVeque 1983.
struct Moments {
  double mean = 0, m2 = 0, count = 0;

  void merge(const Moments& b) {
    if (b.count == 0) return;
    const double total = count + b.count, delta = b.mean - mean;
    mean += delta * (b.count / total);
    m2 += b.m2 + delta * delta * count * (b.count / total);
    count = total;
  }
};

// Of `count` values, how many serve to guess their mean: a power of two, so that equal values give themselves.
inline int64_t shift_samples(int64_t count) { return count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1; }

// The shift is near the mean, not just any value: the farther it is, the more digits the difference of sums loses.
inline Moments block_moments(const float* x, int64_t n) {
  const int64_t samples = shift_samples(n);
  float shift = 0;
  for (int64_t i = 0; i < samples; ++i) shift += x[i * n / samples];
  shift /= static_cast<float>(samples);
  const Sums s = shifted_sums(x, n, shift);
  const double mean = double(s.sum) / double(n);
  const double m2 = double(s.sum_sq) - double(s.sum) * mean;
  return {shift + mean, m2 < 0 ? 0.0 : m2, double(n)};
}
inline Moments block_moments(const double* x, int64_t n) {
  double sum = 0, sum_sq = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] - x[0];
  const double mean = x[0] + sum / double(n);
  for (int64_t i = 0; i < n; ++i) sum_sq += (x[i] - mean) * (x[i] - mean);
  return {mean, sum_sq, double(n)};
}

inline void normalize_row(const double* x, double* y, int64_t n, double mean, double scale, double bias) {
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale + bias;
}
inline void normalize_columns(const double* x, double* y, int64_t positions, int64_t channels, const double* mean,
                              const double* scale, const double* bias) {
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      y[p * channels + c] = (x[p * channels + c] - mean[c]) * scale[c] + bias[c];
    }
  }
}

template <typename F>
inline void parallel(int64_t units, const F& f) {
  torch::stable::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

}  // namespace kgopt::cpu
