// Blocks of a tensor in the accumulation type: float for float, bf16 and half, double for double.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "common/cpu/math.h"
#include "common/host/torch_utils.h"

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
    half_to_float(reinterpret_cast<const uint16_t*>(from), to, n);
  } else {
    std::memcpy(to, from, n * sizeof(T));
  }
}

template <typename T>
inline void store_block(const acc_t<T>* from, T* to, int64_t n) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    float_to_bf16(from, reinterpret_cast<uint16_t*>(to), n);
  } else if constexpr (std::is_same_v<T, Half>) {
    float_to_half(from, reinterpret_cast<uint16_t*>(to), n);
  } else if (static_cast<const void*>(from) != to) {
    std::memcpy(to, from, n * sizeof(T));
  }
}

// A block to read: the tensor's own memory where that is of the accumulation type, else converted into the buffer.
template <typename T>
inline const acc_t<T>* view_block(const T* from, acc_t<T>* buffer, int64_t n) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    return from;
  } else {
    load_block(from, buffer, n);
    return buffer;
  }
}
// Where to put a block that store_block then writes to the tensor, which costs nothing where it already is there.
template <typename T>
inline acc_t<T>* target_block(T* to, acc_t<T>* buffer) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    return to;
  } else {
    return buffer;
  }
}

// chain(x): x itself where the chain is empty, else in the buffer, which may be x.
template <typename T>
inline const T* activate_chain(const ActChain& chain, const T* x, T* buffer, int64_t n) {
  for (int i = 0; i < chain.length; ++i) {
    activate(chain.step<T>(i), x, buffer, n);
    x = buffer;
  }
  return x;
}

// g * chain'(x): g itself where the chain is empty, else in `to`, which may be g. From the last activation to the
// first, as PyTorch's backward: what a gradient meets after one that stops it counts, and what it met before does not.
// The buffer is for values within the chain.
template <typename T>
inline const T* chain_gradient(const ActChain& chain, const T* x, T* buffer, const T* g, T* to, int64_t n) {
  for (int i = chain.length - 1; i >= 0; --i) {
    ActChain before = chain;
    before.length = i;
    activate_gradient(chain.step<T>(i), activate_chain(before, x, buffer, n), g, to, n);
    g = to;
  }
  return g;
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

inline Dtype dtype_of(const Tensor& t) { return check_dtype("kgopt", "a tensor", t); }

// Values of a small vector ([C] parameters, [N, G] statistics) in double; `missing` where there is no tensor.
inline std::vector<double> read_all(const OptTensor& t, int64_t n, double missing = 0) {
  std::vector<double> v(n, missing);
  if (t) {
    const Tensor dense = dense_in(*t, MemoryFormat::Contiguous);
    dispatch_dtype(dtype_of(dense), [&](auto zero) {
      const auto* const from = static_cast<const decltype(zero)*>(dense.const_data_ptr());
      for (int64_t i = 0; i < n; ++i) v[i] = static_cast<acc_t<decltype(zero)>>(from[i]);
    });
  }
  return v;
}

inline void write_all(const Tensor& t, const std::vector<double>& values) {
  dispatch_dtype(dtype_of(t), [&](auto zero) {
    using T = decltype(zero);
    T* const to = static_cast<T*>(t.mutable_data_ptr());
    for (size_t i = 0; i < values.size(); ++i) to[i] = static_cast<T>(static_cast<acc_t<T>>(values[i]));
  });
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

// Of `count` values, how many serve to guess their mean.
inline int64_t shift_samples(int64_t count) { return count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1; }

// The mean of the two in the middle of four, which one outlier does not move.
template <typename T>
inline T middle_of_four(T a, T b, T c, T d) {
  const T low = std::max(std::min(a, b), std::min(c, d)), high = std::min(std::max(a, b), std::max(c, d));
  return T(0.5) * low + T(0.5) * high;
}

// A guess of the mean from 8, 4, 2 samples or 1, `stride` apart. Equal values give themselves.
template <typename T>
inline T shift_of(const T* v, int64_t samples, int64_t stride) {
  if (samples == 1) return v[0];
  if (samples == 2) return T(0.5) * v[0] + T(0.5) * v[stride];
  const T first = middle_of_four(v[0], v[stride], v[2 * stride], v[3 * stride]);
  if (samples == 4) return first;
  v += 4 * stride;
  return T(0.5) * first + T(0.5) * middle_of_four(v[0], v[stride], v[2 * stride], v[3 * stride]);
}

// From the sums of x - shift and its square.
inline Moments shifted_moments(double shift, double sum, double sum_sq, double count) {
  const double mean = sum / count, m2 = sum_sq - sum * mean;
  return {shift + mean, m2 < 0 ? 0.0 : m2, count};
}

// Calls f(i) for every unit of work, in parallel where that is worth the start of a thread.
template <typename F>
inline void parallel(int64_t units, int64_t elements_per_unit, const F& f) {
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, elements_per_unit));
  torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

}  // namespace kgopt::cpu
