// Pointwise chains inside the kernels. A few single activations are compiled in; every other chain is walked at run
// time, a vector of values at a step, so that finding out which activation it is costs little. The launcher picks once.
// Chains lie in the kernel's parameters, which are __grid_constant__: a walk reads them by index.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "common/activation.h"

namespace kgopt {

// ---------------------------------------------------------------------------------------------------------------------
// Activations in fp32. bf16 kernels run out of issue slots before they run out of bandwidth: at an H200's there is room
// for some 27 instructions an element. These take 2 to 18, with at most two of the special function unit's, and are
// right to a few units in the last place; the libraries' functions take up to 40.

// For results that are rounded to bf16, whose rounding is coarser than what the shortest way leaves.
template <typename T>
inline constexpr bool kIsCoarse = std::is_same_v<T, __nv_bfloat16>;

// __expf and __fdividef take three more instructions for subnormal numbers.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_exp(float x) { return fast_exp2(x * 1.44269504f); }
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Below x = -87.3 this is 0.
__device__ __forceinline__ float fast_sigmoid(float x) { return fast_reciprocal(1.f + fast_exp(-x)); }
// For bf16: one special function instead of two, sigmoid(x) being (1 + tanh(x / 2)) / 2.
__device__ __forceinline__ float coarse_silu_of_half(float half) {
  float t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(half));
  return fmaf(half, t, half);
}
__device__ __forceinline__ float coarse_silu(float x) { return coarse_silu_of_half(0.5f * x); }
// These keep NaN.
__device__ __forceinline__ float fast_max(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float fast_min(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float fast_relu(float x) { return fast_max(x, 0.f); }

template <int kTerms>
__device__ __forceinline__ float polynomial(float x, const float (&terms)[kTerms]) {
  float y = terms[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) y = fmaf(y, x, terms[i]);
  return y;
}

// tanh(x) / x - 1 of the square of a small x.
__device__ __forceinline__ float tanh_rest(float square) {
  return square * polynomial(square, {-0.333329465f, 0.133207227f, -0.0526716482f, 0.0164372404f});
}

template <bool kCoarse>
__device__ __forceinline__ float fast_tanh(float x) {
  if constexpr (kCoarse) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  const float square = x * x, e = fast_exp2(fabsf(x) * 2.88539008f);
  const float large = copysignf(fmaf(-2.f, fast_reciprocal(1.f + e), 1.f), x);
  return square < 0.3f ? fmaf(x, tanh_rest(square), x) : large;
}

// Phi(x) and exp(-x^2 / 2): Phi(-|x|) is the latter times a polynomial in 1 / (1 + p |x|), in the manner of Abramowitz
// and Stegun 7.1.26, fitted for relative error: 1.3e-7, coarse 9e-6.
template <bool kCoarse>
__device__ __forceinline__ float normal_cdf(float x, float* density) {
  const float t = fast_reciprocal(fmaf(fabsf(x), kCoarse ? 0.36f : 0.25f, 1.f));
  const float e = fast_exp2(x * x * -0.72134752f);
  float tail;
  if constexpr (kCoarse) {
    tail = polynomial(t, {0.141810414f, 0.163065611f, 0.0440343461f, 0.24766403f, -0.096578663f});
  } else {
    tail = polynomial(
        t, {0.0983987084f, 0.1157358f, 0.0127697068f, 0.302359795f, -0.287429939f, 0.351857896f, -0.0936919021f});
  }
  tail *= t * e;
  *density = e;
  return x > 0.f ? 1.f - tail : tail;
}

// log(1 + y) for 0 <= y <= 1, as 2 atanh(y / (2 + y)).
template <bool kCoarse>
__device__ __forceinline__ float fast_log1p(float y) {
  const float s = y * fast_reciprocal(2.f + y), square = s * s;
  if constexpr (kCoarse) return s * polynomial(square, {2.00001438f, 0.66438031f, 0.452963455f});
  return s * polynomial(square, {2.f, 0.666663146f, 0.400249153f, 0.279605112f, 0.281788382f});
}

// 1 / (1 + |x|), which is above 0 for every number.
__device__ __forceinline__ float softsign_factor(float x) {
  return 0.0625f * fast_reciprocal(fmaf(fabsf(x), 0.0625f, 0.0625f));
}

// exp(x) - 1 for x <= 0.
template <bool kCoarse>
__device__ __forceinline__ float fast_expm1(float x) {
  if constexpr (kCoarse) return x < -0.0625f ? fast_exp(x) - 1.f : x * polynomial(x, {1.f, 0.5f, 0.166666667f});
  const float rest = polynomial(x, {0.499999865f, 0.166662887f, 0.0416320444f, 0.00819328528f, 0.00112591379f});
  const float small = fmaf(x * x, rest, x);
  return x < -0.5f ? fast_exp(x) - 1.f : small;
}

template <Act kAct, bool kCoarse>
__device__ __forceinline__ float fast_value(float x, float a = 0.f, float b = 0.f) {
  if constexpr (kAct == Act::kRelu) return fast_relu(x);
  if constexpr (kAct == Act::kLeakyRelu) return x > 0.f ? x : x * a;
  if constexpr (kAct == Act::kSilu) return x * fast_sigmoid(x);
  if constexpr (kAct == Act::kGelu) {
    float density;
    return x * normal_cdf<kCoarse>(x, &density);
  }
  // 0.5 (1 + tanh(u)) is sigmoid(2 u).
  if constexpr (kAct == Act::kGeluTanh) return x * fast_sigmoid(x * fmaf(x * x, 0.0713548163f, 1.59576912f));
  if constexpr (kAct == Act::kSigmoid) return fast_sigmoid(x);
  if constexpr (kAct == Act::kTanh) return fast_tanh<kCoarse>(x);
  if constexpr (kAct == Act::kHardswish) return x * (fminf(fmaxf(x + 3.f, 0.f), 6.f) * (1.f / 6));
  if constexpr (kAct == Act::kHardtanh || kAct == Act::kClamp) return fast_min(fast_max(x, a), b);
  if constexpr (kAct == Act::kElu) return x > 0.f ? x * b : a * fast_expm1<kCoarse>(x);
  if constexpr (kAct == Act::kCelu) return x > 0.f ? x : a * fast_expm1<kCoarse>(x * b);
  if constexpr (kAct == Act::kMish) {
    // tanh(softplus(x)) is n / (n + 2) with n = e^2 + 2 e, e = exp(x); above 20 it is 1, and e^2 may not overflow.
    const float e = fast_exp(fast_min(x, 20.f)), n = fmaf(e, e, 2.f * e);
    return x * (n * fast_reciprocal(n + 2.f));
  }
  if constexpr (kAct == Act::kSoftplus) return fast_relu(x) + fast_log1p<kCoarse>(fast_exp(-fabsf(x)));
  if constexpr (kAct == Act::kAnySoftplus) {
    const float z = x * a, any = fast_relu(z) + fast_log1p<kCoarse>(fast_exp(-fabsf(z)));
    return z > b ? x : any * fast_reciprocal(a);
  }
  if constexpr (kAct == Act::kAdd) return x + a;
  if constexpr (kAct == Act::kMul) return x * a;
  if constexpr (kAct == Act::kHardsigmoid) return fast_min(fast_max(x + 3.f, 0.f), 6.f) * (1.f / 6);
  if constexpr (kAct == Act::kLogsigmoid) return fast_min(x, 0.f) - fast_log1p<kCoarse>(fast_exp(-fabsf(x)));
  if constexpr (kAct == Act::kTanhshrink) {
    const float square = x * x, large = x - fast_tanh<false>(x);
    return square < 0.3f ? -x * tanh_rest(square) : large;
  }
  if constexpr (kAct == Act::kSoftsign) return x * softsign_factor(x);
  if constexpr (kAct == Act::kThreshold || kAct == Act::kSoftshrink || kAct == Act::kHardshrink) {
    return act_value(ActStep<float>{kAct, a, b}, x);
  }
  return x;
}

// At kinks the derivative is the one PyTorch's backward uses, and so it is at NaN and infinities.
template <Act kAct, bool kCoarse>
__device__ __forceinline__ float fast_derivative(float x, float a = 0.f, float b = 0.f) {
  if constexpr (kAct == Act::kSilu) {
    const float s = fast_sigmoid(x);
    return s * fmaf(x, 1.f - s, 1.f);
  }
  if constexpr (kAct == Act::kGelu) {
    float density;
    const float cdf = normal_cdf<kCoarse>(x, &density);
    return fmaf(x * 0.39894228f, density, cdf);
  }
  if constexpr (kAct == Act::kGeluTanh) {
    const float square = x * x, s = fast_sigmoid(x * fmaf(square, 0.0713548163f, 1.59576912f));
    return fmaf(x * (s * (1.f - s)), fmaf(square, 0.214064449f, 1.59576912f), s);
  }
  if constexpr (kAct == Act::kSigmoid) {
    const float s = fast_sigmoid(x);
    return s * (1.f - s);
  }
  if constexpr (kAct == Act::kTanh) {
    const float t = fast_tanh<kCoarse>(x);
    return 1.f - t * t;
  }
  if constexpr (kAct == Act::kHardswish) {
    const float between = x < 3.f ? fmaf(x, 1.f / 3, 0.5f) : 1.f;
    return x <= -3.f ? 0.f : between;
  }
  if constexpr (kAct == Act::kElu) return x <= 0.f ? a * fast_exp(x) : b;
  if constexpr (kAct == Act::kCelu) return x <= 0.f ? a * b * fast_exp(x * b) : 1.f;
  if constexpr (kAct == Act::kMish) {
    const float most = fast_min(x, 20.f), e = fast_exp(most), n = fmaf(e, e, 2.f * e), r = fast_reciprocal(n + 2.f);
    return fmaf(x, 0.f, r * fmaf(most * r, 4.f * fmaf(e, e, e), n));  // NaN at infinity
  }
  if constexpr (kAct == Act::kSoftplus) return fast_sigmoid(x);
  if constexpr (kAct == Act::kAnySoftplus) return x * a > b ? 1.f : fast_sigmoid(x * a);
  if constexpr (kAct == Act::kLogsigmoid) return fast_sigmoid(-x);
  if constexpr (kAct == Act::kSoftsign) {
    const float r = softsign_factor(x);
    return fmaf(x * r, 0.f, r * r);  // NaN at infinity
  }
  if constexpr (kAct == Act::kTanhshrink) {
    const float t = fast_tanh<false>(x);
    return t * t;
  }
  return act_derivative(ActStep<float>{kAct, a, b}, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Chains walked at run time.

template <int kSize>
struct Floats {
  float v[kSize];
};

// Call f with the activation as a compile-time constant. All threads take the same way.
template <typename F>
__device__ __forceinline__ void with_rare_act(Act act, F f) {
  switch (act) {
    case Act::kCelu: return f(std::integral_constant<Act, Act::kCelu>());
    case Act::kAnySoftplus: return f(std::integral_constant<Act, Act::kAnySoftplus>());
    case Act::kThreshold: return f(std::integral_constant<Act, Act::kThreshold>());
    case Act::kHardsigmoid: return f(std::integral_constant<Act, Act::kHardsigmoid>());
    case Act::kLogsigmoid: return f(std::integral_constant<Act, Act::kLogsigmoid>());
    case Act::kSoftsign: return f(std::integral_constant<Act, Act::kSoftsign>());
    case Act::kTanhshrink: return f(std::integral_constant<Act, Act::kTanhshrink>());
    case Act::kSoftshrink: return f(std::integral_constant<Act, Act::kSoftshrink>());
    case Act::kHardshrink: return f(std::integral_constant<Act, Act::kHardshrink>());
    default: return;
  }
}
template <typename F, typename G>
__device__ __forceinline__ void with_act(Act act, F f, G rare) {
  switch (act) {
    case Act::kRelu: return f(std::integral_constant<Act, Act::kRelu>());
    case Act::kLeakyRelu: return f(std::integral_constant<Act, Act::kLeakyRelu>());
    case Act::kSilu: return f(std::integral_constant<Act, Act::kSilu>());
    case Act::kGelu: return f(std::integral_constant<Act, Act::kGelu>());
    case Act::kGeluTanh: return f(std::integral_constant<Act, Act::kGeluTanh>());
    case Act::kSigmoid: return f(std::integral_constant<Act, Act::kSigmoid>());
    case Act::kTanh: return f(std::integral_constant<Act, Act::kTanh>());
    case Act::kHardswish: return f(std::integral_constant<Act, Act::kHardswish>());
    case Act::kHardtanh: return f(std::integral_constant<Act, Act::kHardtanh>());
    case Act::kElu: return f(std::integral_constant<Act, Act::kElu>());
    case Act::kMish: return f(std::integral_constant<Act, Act::kMish>());
    case Act::kSoftplus: return f(std::integral_constant<Act, Act::kSoftplus>());
    case Act::kClamp: return f(std::integral_constant<Act, Act::kClamp>());
    case Act::kAdd: return f(std::integral_constant<Act, Act::kAdd>());
    case Act::kMul: return f(std::integral_constant<Act, Act::kMul>());
    default: return rare();
  }
}

// The activations that few networks have, some values at a time whatever the caller's vectors are: there once.
template <int kPart>
__device__ __noinline__ Floats<kPart> rare_values(Act act, float a, float b, Floats<kPart> x) {
  with_rare_act(act, [&](auto act) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) x.v[j] = fast_value<decltype(act)::value, false>(x.v[j], a, b);
  });
  return x;
}
// Slopes at x, and a bit for each value that stops the gradient.
template <int kPart>
struct RareSlopes {
  float v[kPart];
  uint32_t stopped;
};
template <int kPart>
__device__ __noinline__ RareSlopes<kPart> rare_slopes(Act act, float a, float b, Floats<kPart> x) {
  RareSlopes<kPart> slopes;
  slopes.stopped = 0;
  with_rare_act(act, [&](auto act) {
    constexpr Act kAct = decltype(act)::value;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const ActStep<float> step{kAct, a, b};
      if (may_stop_gradient(kAct) && stops_gradient(step, x.v[j])) slopes.stopped |= 1u << j;
      slopes.v[j] = fast_derivative<kAct, false>(x.v[j], a, b);
    }
  });
  return slopes;
}
// Values of a call of these. More would make them faster, and every kernel larger.
inline constexpr int kRarePart = 1;

// Out of line: in line, every activation would be there once for each place that has a chain. The caller has the loop
// over the chain (walk_chain): it can read the kernel's parameters by index.
template <int kSize, bool kCoarse>
__device__ __noinline__ Floats<kSize> any_act_values(Act act, float a, float b, Floats<kSize> x) {
  with_act(
      act,
      [&](auto act) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) x.v[j] = fast_value<decltype(act)::value, kCoarse>(x.v[j], a, b);
      },
      [&] {
        constexpr int kPart = kRarePart;
#pragma unroll
        for (int first = 0; first < kSize; first += kPart) {
          Floats<kPart> part;
#pragma unroll
          for (int j = 0; j < kPart; ++j) part.v[j] = x.v[first + j];
          part = rare_values<kPart>(act, a, b, part);
#pragma unroll
          for (int j = 0; j < kPart; ++j) x.v[first + j] = part.v[j];
        }
      });
  return x;
}

// `by` times the slopes at x; with `goes_on`, x becomes the activation's values. A bit of `stopped` for each value
// whose gradient is 0 whatever `by` was, and of `nans` for each at which a slope was NaN: what stops behind it is NaN
// then (ChainSlope).
template <int kSize>
struct FloatsBy {
  float v[kSize], by[kSize];
  uint32_t stopped, nans;
};
template <int kSize, bool kCoarse>
__device__ __noinline__ FloatsBy<kSize> any_act_slopes(Act act, float a, float b, bool goes_on, FloatsBy<kSize> x) {
  with_act(
      act,
      [&](auto act) {
        constexpr Act kAct = decltype(act)::value;
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (may_stop_gradient(kAct) && stops_gradient(ActStep<float>{kAct, a, b}, x.v[j])) {
            x.stopped |= ~x.nans & 1u << j;
          }
          const float slope = fast_derivative<kAct, kCoarse>(x.v[j], a, b);
          if (!may_stop_gradient(kAct) && slope != slope) x.nans |= ~x.stopped & 1u << j;
          x.by[j] *= slope;
        }
      },
      [&] {
        constexpr int kPart = kRarePart;
#pragma unroll
        for (int first = 0; first < kSize; first += kPart) {
          Floats<kPart> part;
#pragma unroll
          for (int j = 0; j < kPart; ++j) part.v[j] = x.v[first + j];
          const RareSlopes<kPart> slopes = rare_slopes<kPart>(act, a, b, part);
          x.stopped |= ~x.nans & slopes.stopped << first;
#pragma unroll
          for (int j = 0; j < kPart; ++j) {
            if (slopes.v[j] != slopes.v[j]) x.nans |= ~x.stopped & 1u << (first + j);
            x.by[first + j] *= slopes.v[j];
          }
        }
      });
  if (!goes_on) return x;
  Floats<kSize> values;
#pragma unroll
  for (int j = 0; j < kSize; ++j) values.v[j] = x.v[j];
  values = any_act_values<kSize, kCoarse>(act, a, b, values);
#pragma unroll
  for (int j = 0; j < kSize; ++j) x.v[j] = values.v[j];
  return x;
}

// fp64 is for checks of gradients: an element at a time, as the host computes it.
__device__ __noinline__ inline double any_act_double(Act act, double a, double b, double x) {
  return act_value(ActStep<double>{act, a, b}, x);
}
__device__ __noinline__ inline ChainSlope<double> any_act_double_slope(Act act, double a, double b,
                                                                       ChainSlope<double> slope) {
  slope.advance({act, a, b});
  return slope;
}

// Calls f(step, is_last) for each activation of a chain that is not empty. `chain` is in the kernel's parameters, and
// of one activation, which most have, nothing is read by an index.
template <typename T, typename F>
__device__ __forceinline__ void walk_chain(const ActChain& chain, F f) {
  ActStep<T> step = chain.first<T>();
  const int length = chain.length;
#pragma unroll 1
  for (int i = 1;; ++i) {
    f(step, i == length);
    if (i == length) return;
    step = chain.step<T>(i);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What the kernels call: one way for chains that are compiled in and for the others.

// Values of a step of the chains that are walked. Those of fp32 accuracy need more instructions each.
template <int kSize, bool kCoarse>
inline constexpr int kChainStep = kSize % 16 == 0 && kCoarse  ? 16
                                  : kSize % 8 == 0 && kCoarse ? 8
                                  : kSize % 4 == 0            ? 4
                                                              : 1;

template <Chain kChain, bool kCoarse, typename Acc, int kSize>
__device__ __forceinline__ void apply_chain(const ActChain& chain, Acc (&x)[kSize]) {
  if constexpr (kChain == Chain::kNone) return;
  if constexpr (kChain == Chain::kAny) {  // the whole grid takes the same branch
    if (chain.length == 0) return;
    // Two lines that meet at 0.
    const bool is_relu = is_one(chain, Act::kRelu);
    if (is_relu || is_leaky_relu(chain)) {
      const ActStep<Acc> step{Act::kLeakyRelu, is_relu ? Acc(1) : chain.first<Acc>().a, Acc(0)};
      const Acc floor = is_relu ? Acc(0) : -Acc(INFINITY);
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[j] = act_value(step, x[j] < floor ? floor : x[j]);
      return;
    }
  }
  if constexpr (kChain == Chain::kAny && kSize == 1 && sizeof(Acc) == 4) {  // kernels without vectors have no others
    if (is_one(chain, Act::kSilu)) return apply_chain<Chain::kSilu, kCoarse>(chain, x);
  }
  if constexpr (std::is_same_v<Acc, double>) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if constexpr (kChain == Chain::kRelu) x[j] = act_value(Act::kRelu, x[j]);
      if constexpr (kChain == Chain::kSilu) x[j] = act_value(Act::kSilu, x[j]);
      if constexpr (kChain == Chain::kAny) {
        walk_chain<double>(chain,
                           [&](const ActStep<double>& f, bool) { x[j] = any_act_double(f.act, f.a, f.b, x[j]); });
      }
    }
  } else if constexpr (kChain == Chain::kAny) {
    constexpr int kStep = kChainStep<kSize, kCoarse>;
#pragma unroll
    for (int first = 0; first < kSize; first += kStep) {
      Floats<kStep> part;
#pragma unroll
      for (int j = 0; j < kStep; ++j) part.v[j] = x[first + j];
      walk_chain<float>(chain, [&](const ActStep<float>& f, bool) {
        part = any_act_values < kStep, kCoarse && kStep % 8 == 0 > (f.act, f.a, f.b, part);
      });
#pragma unroll
      for (int j = 0; j < kStep; ++j) x[first + j] = part.v[j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if constexpr (kChain == Chain::kRelu) x[j] = fast_relu(x[j]);
      if constexpr (kChain == Chain::kLeakyRelu) {
        x[j] = act_value(ActStep<Acc>{Act::kLeakyRelu, chain.first<Acc>().a, Acc(0)}, x[j]);
      }
      if constexpr (kChain == Chain::kSilu) x[j] = x[j] * fast_sigmoid(x[j]);
    }
  }
}

// What weights and biases of a norm may be multiplied by for finish_chain with kScaled.
template <Chain kChain, typename T>
inline constexpr float kFinishScale = kChain == Chain::kSilu && kIsCoarse<T> ? 0.5f : 1.f;

// The chain behind a norm whose results are rounded to T. SiLU of a coarse T takes three instructions instead of five,
// two with kScaled, where x is that times kFinishScale, which is exact.
template <Chain kChain, typename T, bool kScaled = false, typename Acc, int kSize>
__device__ __forceinline__ void finish_chain(const ActChain& chain, Acc (&x)[kSize]) {
  if constexpr (kChain == Chain::kSilu && kIsCoarse<T>) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = kScaled ? coarse_silu_of_half(x[j]) : coarse_silu(x[j]);
  } else {
    apply_chain<kChain, kIsCoarse<T>>(chain, x);
  }
}

// Whose gradient is 0 whatever comes in, NaN too, of kSize values: none, where the chain has no such activation; bits
// of one register for chains that are walked, which have none to spare.
template <Chain kChain, int kSize>
struct Stopped {
  uint32_t bits = 0;
  __device__ __forceinline__ bool operator[](int j) const { return bits >> j & 1; }
};
template <int kSize>
struct Stopped<Chain::kRelu, kSize> {
  bool values[kSize];
  __device__ __forceinline__ bool operator[](int j) const { return values[j]; }
};
template <int kSize>
struct Stopped<Chain::kNone, kSize> {
  __device__ __forceinline__ bool operator[](int) const { return false; }
};
template <int kSize>
struct Stopped<Chain::kSilu, kSize> : Stopped<Chain::kNone, kSize> {};
template <int kSize>
struct Stopped<Chain::kLeakyRelu, kSize> : Stopped<Chain::kNone, kSize> {};

// `by` times the chain's slopes at x; with kValues, x becomes the chain's values, and is undefined after otherwise.
// Where the gradient is stopped, `by` means nothing.
template <Chain kChain, bool kCoarse, bool kValues, typename Acc, int kSize>
__device__ __forceinline__ Stopped<kChain, kSize> chain_slopes(const ActChain& chain, Acc (&x)[kSize],
                                                               Acc (&by)[kSize]) {
  Stopped<kChain, kSize> stopped;
  if constexpr (kChain == Chain::kNone) return stopped;
  if constexpr (kChain == Chain::kAny) {
    if (chain.length == 0) return stopped;
    if (is_leaky_relu(chain)) {
      chain_slopes<Chain::kLeakyRelu, kCoarse, kValues>(chain, x, by);
      return stopped;
    }
  }
  if constexpr (kChain == Chain::kLeakyRelu) {
    const ActStep<Acc> step{Act::kLeakyRelu, chain.first<Acc>().a, Acc(0)};
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      by[j] *= act_derivative(step, x[j]);
      if (kValues) x[j] = act_value(step, x[j]);
    }
    return stopped;
  }
  if constexpr (kChain == Chain::kAny && kSize == 1 && sizeof(Acc) == 4) {
    if (is_one(chain, Act::kRelu)) {
      stopped.bits = chain_slopes<Chain::kRelu, kCoarse, kValues>(chain, x, by)[0];
      return stopped;
    }
    if (is_one(chain, Act::kSilu)) {
      chain_slopes<Chain::kSilu, kCoarse, kValues>(chain, x, by);
      return stopped;
    }
  }
  if constexpr (kChain == Chain::kAny && std::is_same_v<Acc, double>) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      ChainSlope<double> slope{x[j], 1., false};
      walk_chain<double>(chain,
                         [&](const ActStep<double>& f, bool) { slope = any_act_double_slope(f.act, f.a, f.b, slope); });
      by[j] *= slope.derivative;
      x[j] = slope.value;
      stopped.bits |= uint32_t(slope.stops()) << j;
    }
  } else if constexpr (kChain == Chain::kAny) {
    constexpr int kStep = kChainStep<kSize, kCoarse>;
#pragma unroll
    for (int first = 0; first < kSize; first += kStep) {
      FloatsBy<kStep> part;
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        part.v[j] = x[first + j];
        part.by[j] = by[first + j];
      }
      part.stopped = part.nans = 0;
      walk_chain<float>(chain, [&](const ActStep<float>& f, bool is_last) {
        part = any_act_slopes < kStep, kCoarse && kStep % 8 == 0 > (f.act, f.a, f.b, kValues || !is_last, part);
      });
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        x[first + j] = part.v[j];
        by[first + j] = part.by[j];
      }
      stopped.bits |= part.stopped << first;
    }
  } else {
    constexpr Act kAct = kChain == Chain::kRelu ? Act::kRelu : Act::kSilu;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if constexpr (kAct == Act::kRelu) {
        stopped.values[j] = stops_gradient(kAct, x[j]);
        if (kValues) x[j] = stopped[j] ? Acc(0) : x[j];
      } else if constexpr (std::is_same_v<Acc, double>) {
        by[j] *= act_derivative(kAct, x[j]);
        if (kValues) x[j] = act_value(kAct, x[j]);
      } else {
        by[j] *= fast_derivative<kAct, false>(x[j]);
        if (kValues) x[j] = fast_value<kAct, false>(x[j]);
      }
    }
  }
  return stopped;
}

// A gradient that comes in becomes the one that goes out.
template <Chain kChain, bool kCoarse, typename Acc, int kSize>
__device__ __forceinline__ void multiply_slopes(const ActChain& chain, Acc (&x)[kSize], Acc (&gradient)[kSize]) {
  const auto stopped = chain_slopes<kChain, kCoarse, false>(chain, x, gradient);
  if constexpr (kChain == Chain::kRelu || kChain == Chain::kAny) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) gradient[j] = stopped[j] ? Acc(0) : gradient[j];
  }
}

// One value.
template <Chain kChain, typename Acc>
__device__ __forceinline__ Acc apply_chain(const ActChain& chain, Acc x) {
  Acc values[1] = {x};
  apply_chain<kChain, false>(chain, values);
  return values[0];
}

// fp64 has no kernels of its own for the chains that are compiled in.
template <typename T>
constexpr Chain chain_for(Chain chain) {
  return std::is_same_v<T, double> ? Chain::kAny : chain;
}

// Runs `body` with kPre and kAct bound to the chains' kinds. Pairs that no network has share the run-time chain.
#define KGOPT_DISPATCH_CHAINS(pre, act, kPre, kAct, ...)                                        \
  do {                                                                                          \
    const ::kgopt::Chain pre_kind = ::kgopt::chain_kind(pre);                                   \
    const ::kgopt::Chain act_kind = ::kgopt::norm_chain_kind(act);                              \
    if (pre_kind == ::kgopt::Chain::kNone && act_kind == ::kgopt::Chain::kNone) {               \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kNone, kAct = ::kgopt::Chain::kNone;      \
      __VA_ARGS__;                                                                              \
    } else if (pre_kind == ::kgopt::Chain::kNone && act_kind == ::kgopt::Chain::kRelu) {        \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kNone, kAct = ::kgopt::Chain::kRelu;      \
      __VA_ARGS__;                                                                              \
    } else if (pre_kind == ::kgopt::Chain::kNone && act_kind == ::kgopt::Chain::kSilu) {        \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kNone, kAct = ::kgopt::Chain::kSilu;      \
      __VA_ARGS__;                                                                              \
    } else if (pre_kind == ::kgopt::Chain::kNone && act_kind == ::kgopt::Chain::kLeakyRelu) {   \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kNone, kAct = ::kgopt::Chain::kLeakyRelu; \
      __VA_ARGS__;                                                                              \
    } else if (pre_kind == ::kgopt::Chain::kRelu && act_kind == ::kgopt::Chain::kNone) {        \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kRelu, kAct = ::kgopt::Chain::kNone;      \
      __VA_ARGS__;                                                                              \
    } else {                                                                                    \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kAny, kAct = ::kgopt::Chain::kAny;        \
      __VA_ARGS__;                                                                              \
    }                                                                                           \
  } while (0)

}  // namespace kgopt
