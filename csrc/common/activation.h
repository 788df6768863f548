// Pointwise chains: values and derivatives of activations, on host and device. Definitions are torch.nn.functional's.
// common/act_names.h has the names of the `act` argument.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define KGOPT_HD __host__ __device__ __forceinline__
#else
#define KGOPT_HD inline
#endif

namespace kgopt {

enum class Act : int {
  kNone = 0,
  kRelu,
  kLeakyRelu,  // a: slope
  kSilu,
  kGelu,
  kGeluTanh,
  kSigmoid,
  kTanh,
  kHardswish,
  kHardtanh,  // a, b: bounds
  kElu,       // a, b: factors below and above 0; selu too
  kMish,
  kSoftplus,
  kClamp,        // a, b: bounds, an infinite one being none
  kAdd,          // a: summand
  kMul,          // a: factor
  kCelu,         // a: alpha, b: 1 / alpha
  kAnySoftplus,  // a: beta, b: threshold
  kThreshold,    // a: threshold, b: value up to it
  kHardsigmoid,
  kLogsigmoid,
  kSoftsign,
  kTanhshrink,
  kSoftshrink,  // a: lambda
  kHardshrink,  // a: lambda
  kCount
};
static_assert(int(Act::kCount) <= 32, "ActChain has five bits for each");

KGOPT_HD constexpr bool takes_parameters(Act act) {
  return act == Act::kLeakyRelu || act == Act::kHardtanh || act == Act::kElu || act == Act::kClamp ||
         act == Act::kAdd || act == Act::kMul || act == Act::kCelu || act == Act::kAnySoftplus ||
         act == Act::kThreshold || act == Act::kSoftshrink || act == Act::kHardshrink;
}

// One activation with its parameters.
template <typename T>
struct ActStep {
  Act act;
  T a, b;
};

// A chain of activations, applied in order. A plain struct, so that it travels by value in the kernels' parameters.
struct ActChain {
  static constexpr int kMaxActs = 15, kMaxParameters = 6;
  uint8_t codes[kMaxActs] = {};  // five bits of Act; above them the row of its parameters, 0 where it has none
  uint8_t length = 0;
  float parameters[kMaxParameters][2] = {};
  double exact[kMaxParameters][2] = {};  // the same, for fp64

  KGOPT_HD Act at(int i) const { return static_cast<Act>(codes[i] & 31); }
  KGOPT_HD bool empty() const { return length == 0; }
  template <typename T>
  KGOPT_HD ActStep<T> step(int i) const {
    const int row = codes[i] >> 5;
    if constexpr (sizeof(T) == 8) return {at(i), exact[row][0], exact[row][1]};
    return {at(i), T(parameters[row][0]), T(parameters[row][1])};
  }
  // step(0), whose parameters are the first ones: a load from a fixed place.
  template <typename T>
  KGOPT_HD ActStep<T> first() const {
    if constexpr (sizeof(T) == 8) return {at(0), exact[0][0], exact[0][1]};
    return {at(0), T(parameters[0][0]), T(parameters[0][1])};
  }
};
static_assert(ActChain::kMaxParameters <= 8, "ActChain has three bits for the row");

// NaN must come through relu, hardtanh and hardswish as in PyTorch, so comparisons are written to keep it.
template <typename T>
KGOPT_HD T clamp_keep_nan(T x, T lo, T hi) {
  x = x < lo ? lo : x;
  return x > hi ? hi : x;  // hi, where lo is above it
}

template <typename T>
KGOPT_HD T sigmoid_value(T x) {
  return T(1) / (T(1) + exp(-x));
}

template <typename T>
KGOPT_HD T softplus_value(T x) {
  return x > T(20) ? x : log1p(exp(x));
}

template <typename T>
KGOPT_HD T act_value(const ActStep<T>& f, T x) {
  switch (f.act) {
    case Act::kRelu: return x < T(0) ? T(0) : x;
    case Act::kLeakyRelu: return x > T(0) ? x : x * f.a;
    case Act::kSilu: return x * sigmoid_value(x);
    case Act::kGelu: return x * T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
    case Act::kGeluTanh: return x * T(0.5) * (T(1) + tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
    case Act::kSigmoid: return sigmoid_value(x);
    case Act::kTanh:
    case Act::kTanhshrink: {
      const T t = tanh(x);
      return f.act == Act::kTanh ? t : x - t;
    }
    case Act::kHardswish: return x * clamp_keep_nan(x + T(3), T(0), T(6)) / T(6);
    case Act::kHardtanh:
    case Act::kClamp: return clamp_keep_nan(x, f.a, f.b);
    case Act::kElu:
    case Act::kCelu: {
      const bool is_elu = f.act == Act::kElu;
      return x > T(0) ? (is_elu ? x * f.b : x) : f.a * expm1(is_elu ? x : x * f.b);
    }
    case Act::kMish: return x * tanh(softplus_value(x));
    case Act::kSoftplus:
    case Act::kAnySoftplus:
    case Act::kLogsigmoid: {  // which is -softplus(-x)
      const T beta = f.act == Act::kSoftplus ? T(1) : f.act == Act::kLogsigmoid ? T(-1) : f.a, z = x * beta;
      const T y = (z < T(0) ? T(0) : z) + log1p(exp(z < T(0) ? z : -z));
      return f.act == Act::kLogsigmoid ? -y : z > (f.act == Act::kSoftplus ? T(20) : f.b) ? x : y / beta;
    }
    case Act::kAdd: return x + f.a;
    case Act::kMul: return x * f.a;
    case Act::kThreshold: return x <= f.a ? f.b : x;
    case Act::kHardsigmoid: return clamp_keep_nan(x + T(3), T(0), T(6)) / T(6);
    case Act::kSoftsign: return x / (T(1) + (x < T(0) ? -x : x));
    case Act::kSoftshrink: return x > f.a ? x - f.a : (x < -f.a ? x + f.a : x * T(0));
    case Act::kHardshrink: return x >= -f.a && x <= f.a ? T(0) : x;
    default: return x;
  }
}
// Of one without parameters.
template <typename T>
KGOPT_HD T act_value(Act act, T x) {
  return act_value(ActStep<T>{act, T(0), T(0)}, x);
}

// Where PyTorch's backward gives 0 without looking at the gradient that comes in, even if that is NaN or infinite: it
// selects there and multiplies elsewhere. At NaN it is what PyTorch's scalar code does, which on CUDA runs everywhere.
KGOPT_HD constexpr bool may_stop_gradient(Act act) {
  return act == Act::kRelu || act == Act::kHardtanh || act == Act::kHardswish || act == Act::kClamp ||
         act == Act::kThreshold || act == Act::kHardsigmoid || act == Act::kSoftshrink || act == Act::kHardshrink;
}
template <typename T>
KGOPT_HD constexpr T lowest() {
  return sizeof(T) == 8 ? T(-DBL_MAX) : T(-FLT_MAX);
}
template <typename T>
KGOPT_HD bool stops_gradient(const ActStep<T>& f, T x) {
  switch (f.act) {
    case Act::kRelu: return x <= T(0);
    case Act::kHardtanh: return x <= f.a || x >= f.b;
    case Act::kHardswish: return x <= T(-3);
    case Act::kClamp: return !((x > f.a || f.a < lowest<T>()) && (x < f.b || f.b > -lowest<T>()));
    case Act::kThreshold: return x <= f.a;
    case Act::kHardsigmoid: return !(x > T(-3) && x < T(3));
    case Act::kSoftshrink:
    case Act::kHardshrink: return x >= -f.a && x <= f.a;
    default: return false;
  }
}
template <typename T>
KGOPT_HD bool stops_gradient(Act act, T x) {
  return stops_gradient(ActStep<T>{act, T(0), T(0)}, x);
}

// Derivative at x. At kinks it is the one PyTorch's backward uses, and at NaN that of its scalar code.
template <typename T>
KGOPT_HD T act_derivative(const ActStep<T>& f, T x) {
  if (may_stop_gradient(f.act) && stops_gradient(f, x)) return T(0);
  switch (f.act) {
    case Act::kLeakyRelu: return x > T(0) ? T(1) : f.a;
    case Act::kSilu: {
      T s = sigmoid_value(x);
      return s * (T(1) + x * (T(1) - s));
    }
    case Act::kGelu: {
      T cdf = T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
      return cdf + x * exp(T(-0.5) * x * x) * T(0.39894228040143267794);
    }
    case Act::kGeluTanh: {
      T t = tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x));
      T dt = (T(1) - t * t) * T(0.79788456080286535588) * (T(1) + T(3 * 0.044715) * x * x);
      return T(0.5) * (T(1) + t) + T(0.5) * x * dt;
    }
    case Act::kSigmoid: {
      T s = sigmoid_value(x);
      return s * (T(1) - s);
    }
    case Act::kTanh:
    case Act::kTanhshrink: {
      const T t = tanh(x);
      return f.act == Act::kTanh ? T(1) - t * t : t * t;
    }
    case Act::kHardswish: return x < T(3) ? x / T(3) + T(0.5) : T(1);
    case Act::kElu:
    case Act::kCelu: {
      const bool is_elu = f.act == Act::kElu;
      return x <= T(0) ? (is_elu ? f.a : f.a * f.b) * exp(is_elu ? x : x * f.b) : (is_elu ? f.b : T(1));
    }
    case Act::kMish: {
      T t = tanh(softplus_value(x));
      return t + x * sigmoid_value(x) * (T(1) - t * t);
    }
    case Act::kSoftplus:
    case Act::kAnySoftplus:
    case Act::kLogsigmoid: {
      const T z = x * (f.act == Act::kSoftplus ? T(1) : f.act == Act::kLogsigmoid ? T(-1) : f.a);
      const bool is_line = f.act != Act::kLogsigmoid && z > (f.act == Act::kSoftplus ? T(20) : f.b);
      return is_line ? T(1) : sigmoid_value(z);
    }
    case Act::kMul: return f.a;
    case Act::kHardsigmoid: return T(1) / T(6);
    case Act::kSoftsign: {
      const T r = T(1) / (T(1) + (x < T(0) ? -x : x));
      return r * r + T(0) * (x * r);  // NaN at infinity
    }
    default: return T(1);
  }
}
template <typename T>
KGOPT_HD T act_derivative(Act act, T x) {
  return act_derivative(ActStep<T>{act, T(0), T(0)}, x);
}

template <typename T>
KGOPT_HD T chain_value(const ActChain& chain, T x) {
  for (int i = 0; i < chain.length; ++i) x = act_value(chain.step<T>(i), x);
  return x;
}

// Forward mode, a step at a time: the derivative of the chain up to a value, and the value, so that nothing is stored
// in between. `stopped`: an activation stopped the gradient. It is 0 then whatever comes in, unless one ahead of that
// has the slope NaN, as silu at infinity: what that is given in the backward is 0, and the product NaN.
template <typename T>
struct ChainSlope {
  T value, derivative;
  bool stopped;

  KGOPT_HD void advance(const ActStep<T>& f) {
    if (!stopped) {
      stopped = stops_gradient(f, value);
      derivative *= stopped ? T(0) : act_derivative(f, value);
    }
    value = act_value(f, value);
  }
  KGOPT_HD bool stops() const { return stopped && derivative == T(0); }
};
template <typename T>
KGOPT_HD T chain_derivative(const ActChain& chain, T x, T* value, bool* stops) {
  ChainSlope<T> slope{x, T(1), false};
  for (int i = 0; i < chain.length; ++i) slope.advance(chain.step<T>(i));
  *value = slope.value;
  *stops = slope.stops();
  return slope.derivative;
}

// What the kernels have compiled in; every other chain is walked at run time. kLeakyRelu: behind a norm alone, in the
// kernels for large tensors.
enum class Chain : int { kNone, kRelu, kSilu, kLeakyRelu, kAny };

inline Chain chain_kind(const ActChain& chain) {
  if (chain.empty()) return Chain::kNone;
  if (chain.length == 1 && chain.at(0) == Act::kRelu) return Chain::kRelu;
  if (chain.length == 1 && chain.at(0) == Act::kSilu) return Chain::kSilu;
  return Chain::kAny;
}

KGOPT_HD bool is_one(const ActChain& chain, Act act) { return chain.length == 1 && chain.at(0) == act; }
KGOPT_HD bool is_leaky_relu(const ActChain& chain) { return is_one(chain, Act::kLeakyRelu); }
// The chain as ReLU where it is one by another name: then kernels need not walk it. Of a clamp from 0 on the values are
// ReLU's, while its gradient is another one at NaN and infinity.
inline ActChain as_relu(ActChain chain, bool backward) {
  if (chain.length != 1) return chain;
  const ActStep<double> f = chain.step<double>(0);
  const bool is_clamp = (f.act == Act::kClamp || f.act == Act::kHardtanh) && f.a == 0 && f.b == INFINITY;
  if ((f.act == Act::kThreshold && f.a == 0 && f.b == 0) || (is_clamp && !backward)) {
    chain = ActChain();
    chain.codes[chain.length++] = static_cast<uint8_t>(Act::kRelu);
  }
  return chain;
}
// The kind of a chain behind a norm, for kernels that know LeakyReLU.
inline Chain norm_chain_kind(const ActChain& chain) {
  return is_leaky_relu(chain) ? Chain::kLeakyRelu : chain_kind(chain);
}
// What the kernels for any chain compute in line.
KGOPT_HD bool is_two_lines(const ActChain& chain) { return is_leaky_relu(chain) || is_one(chain, Act::kRelu); }

// Whether the pair of chains around a norm is one of those that KGOPT_DISPATCH_CHAINS (pointwise.cuh) tells apart, or
// one that the kernels for any chain compute in line.
inline bool is_compiled_in(const ActChain& pre, const ActChain& act) {
  const Chain pre_kind = chain_kind(pre), act_kind = norm_chain_kind(act);
  return (pre_kind == Chain::kNone && act_kind != Chain::kAny) ||
         (pre_kind == Chain::kRelu && act_kind == Chain::kNone);
}

}  // namespace kgopt
