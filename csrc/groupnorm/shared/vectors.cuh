// Steps of the kernels that keep x on chip, for one 16-byte vector.
#pragma once

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/floor.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/params.h"
#include "groupnorm/shared/prelu.cuh"

namespace kgopt {

template <Chain kPre, typename T, int kVec>
__device__ __forceinline__ void values_of(const Vec<T, kVec>& from, const ActChain& pre, float (&x)[kVec]) {
  unpack(from, x);
  apply_chain<kPre, kIsCoarse<T>>(pre, x);
}

// Something that depends on every one of the vectors.
template <typename T, int kVec, int kCount>
__device__ __forceinline__ uint32_t any_bits(const Vec<T, kVec> (&v)[kCount]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits ^= *reinterpret_cast<const uint32_t*>(&v[i]);
  return bits;
}

// The same bits, of which the compiler no longer knows what was computed from them: what it would keep for a second use
// takes two or more registers for each of these.
template <typename T, int kVec, int kCount>
__device__ __forceinline__ void forget_values(Vec<T, kVec> (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint4 bits = *reinterpret_cast<const uint4*>(&v[i]);
    asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
    v[i] = *reinterpret_cast<const Vec<T, kVec>*>(&bits);
  }
}

// A sum whose additions do not wait for one another.
template <int kVec>
__device__ __forceinline__ float sum_of(const float (&x)[kVec]) {
  float total = (x[0] + x[1]) + (x[2] + x[3]);
#pragma unroll
  for (int j = 4; j < kVec; j += 4) total += (x[j] + x[j + 1]) + (x[j + 2] + x[j + 3]);
  return total;
}

// Moments of the values one thread sees: sums relative to its first vector's mean, which is close to all others' unless
// the values spread so far that nothing cancels.
template <int kVec>
struct ThreadMoments {
  float shift = 0.f, sums[4] = {}, squares[4] = {};
  int count = 0;

  __device__ __forceinline__ void add(const float (&x)[kVec]) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float d = x[j] - shift;
      sums[j % 4] += d;
      squares[j % 4] += d * d;
    }
  }
  __device__ __forceinline__ Moments<float> moments() const {
    if (count == 0) return {};
    const float sum = sum_of(sums), n = static_cast<float>(count), offset = __fdividef(sum, n);
    const float m2 = sum_of(squares) - sum * offset;
    return {shift + offset, m2 < 0.f ? 0.f : m2, n};
  }
};

// Weight and bias of a channel.
__device__ __forceinline__ float2 affine_of(const void* weight, const void* bias, int64_t c, Dtype dtype) {
  return make_float2(weight ? load_as<float>(weight, c, dtype) : 1.f, bias ? load_as<float>(bias, c, dtype) : 0.f);
}
// The same where x's type T is known: they are of that type or fp32, and a kernel has many places that ask for them.
template <typename T>
__device__ __forceinline__ float parameter_of(const void* values, int64_t c, Dtype dtype) {
  if constexpr (sizeof(T) < sizeof(float)) {
    if (dtype != Dtype::kFloat32) return to_acc(static_cast<const T*>(values)[c]);
  }
  return static_cast<const float*>(values)[c];
}
template <typename T>
__device__ __forceinline__ float2 affine_of(const void* weight, const void* bias, int64_t c, Dtype dtype) {
  return make_float2(weight ? parameter_of<T>(weight, c, dtype) : 1.f, bias ? parameter_of<T>(bias, c, dtype) : 0.f);
}
// The same in one trip to memory: a conversion waits for what it converts. It takes a register more.
template <typename T>
__device__ __forceinline__ float2 affine_at_once(const void* weight, const void* bias, int64_t c, Dtype dtype) {
  const auto both = [&](auto one, auto zero) {
    using Stored = decltype(one);
    if (weight) one = static_cast<const Stored*>(weight)[c];
    if (bias) zero = static_cast<const Stored*>(bias)[c];
    return make_float2(to_acc(one), to_acc(zero));
  };
  if constexpr (sizeof(T) < sizeof(float)) {
    if (dtype != Dtype::kFloat32) return both(from_acc<T>(1.f), from_acc<T>(0.f));
  }
  return both(1.f, 0.f);
}

// Sums of a thread's values of each of its channels, relative to one of them.
template <int kVec>
__device__ __forceinline__ void add_relative(const float (&v)[kVec], const float (&origin)[kVec], float (&sum)[kVec],
                                             float (&squares)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const float e = v[j] - origin[j];
    sum[j] += e;
    squares[j] += e * e;
  }
}

// The mean is subtracted first: folded into the bias it would cancel only after rounding.
template <int kVec>
__device__ __forceinline__ void scale_shift(float (&x)[kVec], float mean, float scale, float shift) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] = (x[j] - mean) * scale + shift;
}

// The same for a vector that crosses into the next channel: coefficients(row) gives weight and bias.
template <int kVec, typename Coefficients>
__device__ __forceinline__ void scale_shift_two(float (&x)[kVec], float mean, float rstd, uint32_t column,
                                                uint32_t length, int64_t row, Coefficients coefficients) {
  const float2 c = coefficients(row), next = coefficients(row + 1);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const bool crossed = column + j >= length;
    x[j] = (x[j] - mean) * ((crossed ? next.x : c.x) * rstd) + (crossed ? next.y : c.y);
  }
}
// The same for channels shorter than the vector.
template <int kVec, typename Coefficients>
__device__ __forceinline__ void scale_shift_many(float (&x)[kVec], float mean, float rstd, uint32_t column,
                                                 uint32_t length, int64_t row, Coefficients coefficients) {
  float2 c = coefficients(row);
#pragma unroll
  for (int j = 0; j < kVec; ++j, ++column) {
    if (column == length) {
      column = 0;
      c = coefficients(++row);
    }
    x[j] = (x[j] - mean) * (c.x * rstd) + c.y;
  }
}
template <int kVec, typename Coefficients>
__device__ __forceinline__ void scale_shift_across(float (&x)[kVec], float mean, float rstd, uint32_t column,
                                                   uint32_t length, int64_t row, Coefficients coefficients) {
  if (length >= kVec) {
    scale_shift_two(x, mean, rstd, column, length, row, coefficients);
  } else {
    scale_shift_many(x, mean, rstd, column, length, row, coefficients);
  }
}
// With parameters from memory, for channels shorter than the vector; out of line, since kernels have many places for
// such vectors and hardly ever a tensor.
template <typename T, int kVec>
__device__ __noinline__ Floats<kVec> scale_shift_short(Floats<kVec> x, float mean, float rstd, uint32_t column,
                                                       uint32_t length, int64_t row, const void* weight,
                                                       const void* bias, Dtype dtype) {
  scale_shift_many(x.v, mean, rstd, column, length, row,
                   [&](int64_t r) { return affine_of<T>(weight, bias, r, dtype); });
  return x;
}
template <typename T, int kVec>
__device__ __forceinline__ void scale_shift_across(float (&x)[kVec], float mean, float rstd, uint32_t column,
                                                   uint32_t length, int64_t row, const void* weight, const void* bias,
                                                   Dtype dtype) {
  if (length >= kVec) {
    scale_shift_two(x, mean, rstd, column, length, row,
                    [&](int64_t r) { return affine_of<T>(weight, bias, r, dtype); });
    return;
  }
  Floats<kVec> all;
#pragma unroll
  for (int j = 0; j < kVec; ++j) all.v[j] = x[j];
  all = scale_shift_short<T>(all, mean, rstd, column, length, row, weight, bias, dtype);
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] = all.v[j];
}

// Backward, of pre_act(x)'s distances from the mean: dy becomes dz. at(j) gives weight * rstd and bias of value j.
template <Chain kAct, bool kCoarse, int kVec, typename At>
__device__ __forceinline__ void make_dz(const ActChain& act, const float (&distance)[kVec], float (&dy)[kVec], At at) {
  if constexpr (kAct != Chain::kNone) {
    float z[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[j] = distance[j] * at(j).x + at(j).y;
    multiply_slopes<kAct, kCoarse>(act, z, dy);
  }
}

// x becomes dx; with kIsDz, dy is dz already. terms(j).x + distance * terms(j).y is what the group takes off.
template <Chain kPre, Chain kAct, bool kCoarse, bool kIsDz, int kVec, typename Mean, typename At, typename Terms>
__device__ __forceinline__ void make_dx(const ActChain& pre, const ActChain& act, float (&x)[kVec], float (&dy)[kVec],
                                        Mean mean, At at, Terms terms) {
  float slope[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) slope[j] = 1.f;
  const auto stopped = chain_slopes<kPre, kCoarse, true>(pre, x, slope);
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] -= mean(j);
  if constexpr (!kIsDz) make_dz<kAct, kCoarse>(act, x, dy, at);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const float dx = slope[j] * (at(j).x * dy[j] - (x[j] * terms(j).y + terms(j).x));
    x[j] = stopped[j] ? 0.f : dx;
  }
}

template <typename T, int kVec>
__device__ __forceinline__ void store_values(T* to, const float (&x)[kVec], bool streaming) {
  const Vec<T, kVec> v = pack<T, kVec>(x);
  const uint4& bits = *reinterpret_cast<const uint4*>(&v);
  if (streaming) {
    __stcs(reinterpret_cast<uint4*>(to), bits);
  } else {
    store_words(to, bits);
  }
}

// The same without a branch at every store.
__device__ __forceinline__ uint64_t store_policy(bool streaming) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return streaming ? evict_first_policy() : evict_normal_policy();
#else
  return streaming;
#endif
}
template <typename T, int kVec>
__device__ __forceinline__ void store_values(T* to, const float (&x)[kVec], uint64_t policy) {
  const Vec<T, kVec> v = pack<T, kVec>(x);
  const uint4& bits = *reinterpret_cast<const uint4*>(&v);
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(bits.x), "r"(bits.y),
               "r"(bits.z), "r"(bits.w), "l"(policy)
               : "memory");
}

// Which instances are given a residual or a PReLU (dispatch_norm).
template <Chain kAct>
inline constexpr bool kMayExtend = kAct == Chain::kAny || kAct == Chain::kLeakyRelu;

// The residual of what will be y's elements from `to` on, asked for ahead of its use; nothing that counts without one.
template <Chain kAct, typename T, int kVec = kVecSize<T>>
__device__ __forceinline__ Vec<T, kVec> residual_of(const GroupNormFwdArgs& p, const T* to) {
  Vec<T, kVec> r{};
  if constexpr (kMayExtend<kAct>) {
    if (p.residual) r = load_vec<T, kVec>(static_cast<const T*>(p.residual) + (to - static_cast<const T*>(p.y)));
  }
  return r;
}
template <Chain kAct, typename T, int kVec>
__device__ __forceinline__ void add_residual(const GroupNormFwdArgs& p, const Vec<T, kVec>& residual,
                                             float (&out)[kVec]) {
  if constexpr (kMayExtend<kAct>) {
    if (!p.residual) return;
    float r[kVec];
    unpack(residual, r);
#pragma unroll
    for (int j = 0; j < kVec; ++j) out[j] += r[j];
  }
}
// The residual, and a PReLU of the sum.
template <Chain kAct, typename T, int kVec>
__device__ __forceinline__ void extend(const GroupNormFwdArgs& p, const T* to, const Vec<T, kVec>& residual,
                                       float (&out)[kVec]) {
  if constexpr (kMayExtend<kAct>) {
    if (!p.is_extended) return;
    add_residual<kAct>(p, residual, out);
    if (p.slopes.data) apply_prelu<T>(p.slopes, to - static_cast<const T*>(p.y), out);
  }
}
template <Chain kAct, typename T, int kVec>
__device__ __forceinline__ void extend(const GroupNormFwdArgs& p, const T* to, float (&out)[kVec]) {
  extend<kAct>(p, to, residual_of<kAct>(p, to), out);
}
template <Chain kAct, typename T>
__device__ __forceinline__ float extended(const GroupNormFwdArgs& p, const T* to, float out) {
  if constexpr (kMayExtend<kAct>) {
    if (!p.is_extended) return out;
    const int64_t at = to - static_cast<const T*>(p.y);
    if (p.residual) out += to_acc(static_cast<const T*>(p.residual)[at]);
    if (p.slopes.data) {
      float one[1] = {out};
      apply_prelu<T>(p.slopes, at, one);
      return one[0];
    }
  }
  return out;
}

// Residual, PReLU, activation, x, store, with `streaming` or its policy. `input` is x again, as it was. With kScaled,
// as finish_chain. Without kExtends neither residual nor PReLU: kernels that are given none, or have done it.
template <Chain kAct, bool kScaled = false, bool kExtends = true, typename T, int kVec, typename Streaming>
__device__ __forceinline__ void finish_values(const GroupNormFwdArgs& p, T* to, const Vec<T, kVec>& input,
                                              Streaming streaming, float (&out)[kVec]) {
  if constexpr (kExtends) extend<kAct>(p, to, out);
  finish_chain<kAct, T, kScaled>(floored(p.act), out);
  if (p.add_input) {
    float x[kVec];
    unpack(input, x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) out[j] += x[j];
  }
  store_values<T, kVec>(to, out, streaming);
}

}  // namespace kgopt
