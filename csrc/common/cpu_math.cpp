#include "cpu_math.h"

// The compiler emits one copy per level and a resolver. Elsewhere the baseline is what there is.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KGOPT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KGOPT_MULTIVERSION
#endif

namespace kgopt::cpu {

KGOPT_MULTIVERSION Sums shifted_sums(const float* x, int64_t n, float shift) {
  float sum[kLanes] = {}, sum_sq[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const float v = x[i + j] - shift;
      sum[j] += v;
      sum_sq[j] += v * v;
    }
  }
  for (int j = 0; i < n; ++i, ++j) {
    const float v = x[i] - shift;
    sum[j] += v;
    sum_sq[j] += v * v;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      sum[j] += sum[j + width];
      sum_sq[j] += sum_sq[j + width];
    }
  }
  return {sum[0], sum_sq[0]};
}

KGOPT_MULTIVERSION void shifted_column_sums(const float* x, int64_t positions, int64_t channels, const float* shift,
                                            float* sum, float* sum_sq) {
  for (int64_t p = 0; p < positions; ++p) {
    const float* const row = x + p * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const float v = row[c] - shift[c];
      sum[c] += v;
      sum_sq[c] += v * v;
    }
  }
}

KGOPT_MULTIVERSION void normalize_row(const float* x, float* y, int64_t n, float mean, float scale, float bias) {
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale + bias;
}

KGOPT_MULTIVERSION void normalize_columns(const float* x, float* y, int64_t positions, int64_t channels,
                                          const float* mean, const float* scale, const float* bias) {
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      y[p * channels + c] = (x[p * channels + c] - mean[c]) * scale[c] + bias[c];
    }
  }
}

namespace {

KGOPT_MULTIVERSION void relu(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0.f ? 0.f : x[i];
}
KGOPT_MULTIVERSION void silu(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] / (1.f + exp_f(-x[i]));
}
KGOPT_MULTIVERSION void sigmoid(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 1.f / (1.f + exp_f(-x[i]));
}
KGOPT_MULTIVERSION void tanh_all(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = tanh_f(x[i]);
}
KGOPT_MULTIVERSION void gelu_tanh(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i];
    x[i] = 0.5f * v * (1.f + tanh_f(0.79788456080286535588f * (v + 0.044715f * v * v * v)));
  }
}
KGOPT_MULTIVERSION void hardswish(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i] + 3.f;
    x[i] = x[i] * (v < 0.f ? 0.f : (v > 6.f ? 6.f : v)) / 6.f;
  }
}

}  // namespace

void activate(Act act, float* x, int64_t n) {
  switch (act) {
    case Act::kNone: return;
    case Act::kRelu: return relu(x, n);
    case Act::kSilu: return silu(x, n);
    case Act::kSigmoid: return sigmoid(x, n);
    case Act::kTanh: return tanh_all(x, n);
    case Act::kGeluTanh: return gelu_tanh(x, n);
    case Act::kHardswish: return hardswish(x, n);
    default:
      for (int64_t i = 0; i < n; ++i) x[i] = act_value(act, x[i]);
  }
}

KGOPT_MULTIVERSION void residual_row(const float* c, float* r, float* maximum, int64_t n, float mean, float scale,
                                     float bias) {
  for (int64_t i = 0; i < n; ++i) {
    const float t = tanh_f((c[i] - mean) * scale + bias);
    const float v = c[i] + t * (t + 3.f) * (1.f / 6.f);  // |tanh| <= 1: hardswish needs no clamp
    r[i] = v;
    maximum[i] = v > maximum[i] ? v : maximum[i];
  }
}

KGOPT_MULTIVERSION void add_exponentials(const float* r, const float* maximum, double* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float shift = std::fabs(maximum[i]) <= 3.402823466e38f ? maximum[i] : 0.f;
    sum[i] += exp_f(r[i] - shift);
  }
}

KGOPT_MULTIVERSION float row_maximum(const float* x, int64_t n, float start) {
  float best[kLanes];
  for (int j = 0; j < kLanes; ++j) best[j] = start;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
  }
  for (int j = 0; i < n; ++i, ++j) best[j] = x[i] > best[j] ? x[i] : best[j];
  for (int j = 1; j < kLanes; ++j) best[0] = best[j] > best[0] ? best[j] : best[0];
  return best[0];
}

KGOPT_MULTIVERSION float row_exponentials(const float* x, int64_t n, float shift) {
  float sum[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) sum[j] += exp_f(x[i + j] - shift);
  }
  for (int j = 0; i < n; ++i, ++j) sum[j] += exp_f(x[i] - shift);
  for (int j = 1; j < kLanes; ++j) sum[0] += sum[j];
  return sum[0];
}

KGOPT_MULTIVERSION void bf16_to_float(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

KGOPT_MULTIVERSION void float_to_bf16(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

}  // namespace kgopt::cpu
