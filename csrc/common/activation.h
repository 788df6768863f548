// Pointwise chains: the names of the `act` argument, their values and derivatives, on host and device.
// Definitions and default parameters are torch.nn.functional's.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#if defined(__CUDACC__)
#define KGOPT_HD __host__ __device__ __forceinline__
#else
#define KGOPT_HD inline
#endif

namespace kgopt {

enum class Act : int {
  kNone = 0,
  kRelu,
  kLeakyRelu,
  kSilu,
  kGelu,
  kGeluTanh,
  kSigmoid,
  kTanh,
  kHardswish,
  kHardtanh,
  kElu,
  kMish,
  kSoftplus,
  kCount
};

inline constexpr const char* kActNames[] = {"none", "relu",      "leaky_relu", "silu", "gelu", "gelu_tanh", "sigmoid",
                                            "tanh", "hardswish", "hardtanh",   "elu",  "mish", "softplus"};
static_assert(sizeof(kActNames) / sizeof(kActNames[0]) == size_t(Act::kCount), "a name for each activation, in order");
static_assert(int(Act::kCount) <= 16, "ActChain has four bits for each");

// A chain of at most kMaxActs activations, applied in order. Four bits each, so that it travels by value.
struct ActChain {
  static constexpr int kMaxActs = 15;
  uint64_t codes = 0;
  int length = 0;

  KGOPT_HD Act at(int i) const { return static_cast<Act>((codes >> (4 * i)) & 15); }
  KGOPT_HD bool empty() const { return length == 0; }
};

// Parses "tanh+hardswish"; "none" and "" add nothing. False, with a message in *error, on an unknown name.
inline bool parse_act_chain(const std::string& text, ActChain* chain, std::string* error) {
  *chain = ActChain{};
  size_t begin = 0;
  while (begin <= text.size()) {
    size_t end = text.find('+', begin);
    if (end == std::string::npos) end = text.size();
    std::string name = text.substr(begin, end - begin);
    begin = end + 1;
    while (!name.empty() && name.front() == ' ') name.erase(name.begin());
    while (!name.empty() && name.back() == ' ') name.pop_back();
    if (text.empty() || name == "none") continue;
    int code = 0;
    for (int i = 1; i < static_cast<int>(Act::kCount); ++i) {
      if (name == kActNames[i]) code = i;
    }
    if (code == 0) {
      *error = "act names an unknown activation '" + name + "' in '" + text + "'; expected a '+'-joined chain of";
      for (const char* known : kActNames) *error += std::string(" ") + known;
      return false;
    }
    if (chain->length == ActChain::kMaxActs) {
      *error = "act has more than 15 activations: '" + text + "'";
      return false;
    }
    chain->codes |= static_cast<uint64_t>(code) << (4 * chain->length++);
  }
  return true;
}

// NaN must come through relu, hardtanh and hardswish as in PyTorch, so comparisons are written to keep it.
template <typename T>
KGOPT_HD T clamp_keep_nan(T x, T lo, T hi) {
  return x < lo ? lo : (x > hi ? hi : x);
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
KGOPT_HD T act_value(Act act, T x) {
  switch (act) {
    case Act::kRelu: return x < T(0) ? T(0) : x;
    case Act::kLeakyRelu: return x < T(0) ? x * T(0.01) : x;
    case Act::kSilu: return x * sigmoid_value(x);
    case Act::kGelu: return x * T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
    case Act::kGeluTanh: return x * T(0.5) * (T(1) + tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
    case Act::kSigmoid: return sigmoid_value(x);
    case Act::kTanh: return tanh(x);
    case Act::kHardswish: return x * clamp_keep_nan(x + T(3), T(0), T(6)) / T(6);
    case Act::kHardtanh: return clamp_keep_nan(x, T(-1), T(1));
    case Act::kElu: return x > T(0) ? x : expm1(x);
    case Act::kMish: return x * tanh(softplus_value(x));
    case Act::kSoftplus: return softplus_value(x);
    default: return x;
  }
}

// Where PyTorch's backward gives 0 without looking at the gradient that comes in, even if that is NaN or infinite: it
// selects there and multiplies elsewhere. Never at NaN.
KGOPT_HD constexpr bool may_stop_gradient(Act act) {
  return act == Act::kRelu || act == Act::kHardtanh || act == Act::kHardswish;
}
template <typename T>
KGOPT_HD bool stops_gradient(Act act, T x) {
  switch (act) {
    case Act::kRelu: return x <= T(0);
    case Act::kHardtanh: return x <= T(-1) || x >= T(1);
    case Act::kHardswish: return x <= T(-3);
    default: return false;
  }
}

// Derivative at x. At kinks it is the one PyTorch's backward uses, and at NaN that of its scalar code.
template <typename T>
KGOPT_HD T act_derivative(Act act, T x) {
  switch (act) {
    case Act::kRelu: return x <= T(0) ? T(0) : T(1);
    case Act::kLeakyRelu: return x > T(0) ? T(1) : T(0.01);
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
    case Act::kTanh: {
      T t = tanh(x);
      return T(1) - t * t;
    }
    case Act::kHardswish: return x <= T(-3) ? T(0) : (x < T(3) ? x / T(3) + T(0.5) : T(1));
    case Act::kHardtanh: return (x <= T(-1) || x >= T(1)) ? T(0) : T(1);
    case Act::kElu: return x <= T(0) ? exp(x) : T(1);
    case Act::kMish: {
      T t = tanh(softplus_value(x));
      return t + x * sigmoid_value(x) * (T(1) - t * t);
    }
    case Act::kSoftplus: return x > T(20) ? T(1) : sigmoid_value(x);
    default: return T(1);
  }
}

template <typename T>
KGOPT_HD T chain_value(const ActChain& chain, T x) {
  for (int i = 0; i < chain.length; ++i) x = act_value(chain.at(i), x);
  return x;
}

// Forward mode: returns d chain/dx and leaves the chain's value in *value, so nothing is stored in between. *stops: the
// gradient is 0 whatever comes in. That is so from the first activation on that stops it, unless one ahead of it has
// the slope NaN, as silu at infinity: what that is given in the backward is 0, and the product NaN.
template <typename T>
KGOPT_HD T chain_derivative(const ActChain& chain, T x, T* value, bool* stops) {
  T derivative = T(1);
  bool stopped = false;
  for (int i = 0; i < chain.length; ++i) {
    const Act act = chain.at(i);
    if (!stopped) {
      stopped = stops_gradient(act, x);
      derivative *= stopped ? T(0) : act_derivative(act, x);
    }
    x = act_value(act, x);
  }
  *value = x;
  *stops = stopped && derivative == T(0);
  return derivative;
}

// What the kernels have compiled in; every other chain is walked at run time.
enum class Chain : int { kNone, kRelu, kSilu, kAny };

inline Chain chain_kind(const ActChain& chain) {
  if (chain.empty()) return Chain::kNone;
  if (chain.length == 1 && chain.at(0) == Act::kRelu) return Chain::kRelu;
  if (chain.length == 1 && chain.at(0) == Act::kSilu) return Chain::kSilu;
  return Chain::kAny;
}

KGOPT_HD bool is_one(const ActChain& chain, Act act) { return chain.length == 1 && chain.at(0) == act; }
KGOPT_HD bool is_leaky_relu(const ActChain& chain) { return is_one(chain, Act::kLeakyRelu); }

// Whether the pair of chains around a norm is one of those that KGOPT_DISPATCH_CHAINS (pointwise.cuh) tells apart, or
// one that the kernels for any chain compute in line.
inline bool is_compiled_in(const ActChain& pre, const ActChain& act) {
  const Chain pre_kind = chain_kind(pre), act_kind = chain_kind(act);
  return (pre_kind == Chain::kNone && (act_kind != Chain::kAny || is_leaky_relu(act))) ||
         (pre_kind == Chain::kRelu && act_kind == Chain::kNone);
}

}  // namespace kgopt
