// logsumexp with a running maximum, in one read.
#include <type_traits>

#include "common/device/dependent_launch.cuh"
#include "reduce/reduce_kernel.cuh"

namespace kgopt {
namespace {

// The value is log(b) + finite(a). As in torch.logsumexp an infinite maximum counts as 0 in the exponent, so that all
// -inf gives -inf, +inf gives +inf, and NaN stays.
template <typename Acc>
struct LogsumexpState {
  static constexpr bool kVectorsAcross = false;  // few channels have a kernel of their own
  Acc a = -INFINITY;                             // maximum
  Acc b = 0;                                     // sum of exp(x - finite(a))

  static __device__ Acc finite(Acc m) { return isinf(m) ? Acc(0) : m; }
  __device__ void rescale(Acc maximum) {
    if (b != Acc(0)) b *= exp(finite(a) - finite(maximum));
    a = maximum;
  }
  template <int kCount>
  __device__ void add(const Acc (&x)[kCount], int count) {
    Acc maximum = a;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count && x[i] > maximum) maximum = x[i];
    }
    if (maximum > a) rescale(maximum);
    const Acc shift = finite(a);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) b += exp(x[i] - shift);
    }
  }
  __device__ void merge(LogsumexpState other) {
    if (other.a > a) {
      rescale(other.a);
    } else {
      other.rescale(a);
    }
    b += other.b;
  }
  __device__ Acc result(Acc) const { return log(b) + finite(a); }
};

// What the logsumexp is taken of: the values themselves,
struct Plain {
  struct Channel {
    __device__ __forceinline__ float operator()(float v) const { return v; }
  };
  __device__ __forceinline__ Channel channel(int64_t, int) const { return {}; }
  __device__ __forceinline__ void begin() const {}
};

// or u + hardswish(tanh(norm(u))) of u = v + shift. Since |tanh| <= 1, hardswish needs no clamp.
struct ResidualOfNorm {
  const float4* table;  // [outer][reduced] of (mean, rstd, weight, bias), which the kernel ahead writes
  const void* shift;    // [reduced] or null
  Dtype shift_dtype;

  struct Channel {
    float scale, offset, shift;
    __device__ __forceinline__ float operator()(float v) const {
      const float h = fmaf(-2.f, __fdividef(1.f, 1.f + __expf(2.f * fmaf(v, scale, offset))), 1.f);
      return fmaf(h, fmaf(h, 1.f / 6.f, 0.5f), v + shift);
    }
  };
  __device__ __forceinline__ Channel channel(int64_t row, int c) const {
    const float4 norm = table[row + c];
    const float own = shift ? load_as<float>(shift, c, shift_dtype) : 0.f, scale = norm.y * norm.z;
    return {scale, fmaf(own - norm.x, scale, norm.w), own};
  }
  __device__ __forceinline__ void begin() const { wait_for_prerequisites(); }
};

// Few channels of many positions: a thread has kUnits runs of kVec neighbouring positions and goes through the
// channels, kFewAtOnce at a time, all of whose loads are under way together. Of few positions, kParts warps share the
// channels of the same ones: what such a launch takes is one thread's way through all channels.
constexpr int kFewThreads = 256, kFewAtOnce = 4, kFewChannels = 32;

template <typename T, int kVec, int kUnits, int kParts, typename Of>
__global__ void __launch_bounds__(kFewThreads)
    logsumexp_few_kernel(const __grid_constant__ ReduceParams p, uint32_t inner_blocks, Of of) {
  const int64_t o = blockIdx.x / inner_blocks, block = blockIdx.x - o * inner_blocks;
  constexpr int kLanes = kFewThreads / kParts, kStep = kLanes * kVec;
  const int lane = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
  const int64_t first = (block * kUnits * kLanes + lane) * kVec;
  const T* const x = static_cast<const T*>(p.x) + o * p.reduced * p.inner + first;
  const int64_t left = p.inner - first;  // a multiple of kVec
  const int channels = static_cast<int>(p.reduced);
  float top[kUnits][kVec], sum[kUnits][kVec];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) top[u][j] = -INFINITY, sum[u][j] = 0.f;
  }
  auto finite = [](float m) { return fabsf(m) == INFINITY ? 0.f : m; };
  of.begin();
  for (int c = part * kFewAtOnce; c < channels; c += kParts * kFewAtOnce) {
    Vec<T, kVec> v[kFewAtOnce][kUnits];
#pragma unroll
    for (int i = 0; i < kFewAtOnce; ++i) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (c + i < channels && u * kStep < left) v[i][u] = load_vec<T, kVec>(x + (c + i) * p.inner + u * kStep);
      }
    }
    typename Of::Channel channel[kFewAtOnce];
#pragma unroll
    for (int i = 0; i < kFewAtOnce; ++i) {
      if (c + i < channels) channel[i] = of.channel(o * channels, c + i);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float before = finite(top[u][j]);
        float r[kFewAtOnce];
#pragma unroll
        for (int i = 0; i < kFewAtOnce; ++i) {
          if (c + i >= channels) continue;
          r[i] = channel[i](to_acc(v[i][u].v[j]));
          top[u][j] = fmaxf(top[u][j], r[i]);
        }
        const float shift = finite(top[u][j]);
        // Nothing is lost with the first channels: their sum before is 0, which an infinite factor must not meet.
        if (c >= kParts * kFewAtOnce && sum[u][j] != 0.f) sum[u][j] *= expf(before - shift);
#pragma unroll
        for (int i = 0; i < kFewAtOnce; ++i) {
          if (c + i < channels) sum[u][j] += expf(r[i] - shift);
        }
      }
    }
  }
  if constexpr (kParts > 1) {
    static_assert(kVec == 1 && kUnits == 1 && kLanes == 32);
    __shared__ float2 states[kParts][kLanes];
    states[part][lane] = make_float2(top[0][0], sum[0][0]);
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int i = 1; i < kParts; ++i) top[0][0] = fmaxf(top[0][0], states[i][lane].x);
    const float shift = finite(top[0][0]);
    sum[0][0] = 0.f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float2 one = states[i][lane];
      if (one.y != 0.f) sum[0][0] += one.y * expf(finite(one.x) - shift);
    }
  }
  T* const y = static_cast<T*>(p.y) + o * p.inner + first;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (u * kStep >= left) continue;
    float result[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) result[j] = logf(sum[u][j]) + finite(top[u][j]);
    store_result(y + u * kStep, pack<T, kVec>(result));
  }
}

template <typename T, int kVec, int kUnits, int kParts, typename Of>
Status launch_few(const ReduceParams& p, const Of& of, cudaStream_t stream) {
  constexpr int kPositions = kFewThreads / kParts * kVec * kUnits;
  const int64_t inner_blocks = (p.inner + kPositions - 1) / kPositions;
  constexpr bool kEarly = std::is_same_v<Of, ResidualOfNorm>;
  return launch_after<logsumexp_few_kernel<T, kVec, kUnits, kParts, Of>>(
      kEarly, "logsumexp_few_kernel", static_cast<unsigned>(inner_blocks * p.outer), kFewThreads, stream, p,
      static_cast<uint32_t>(inner_blocks), of);
}

template <typename T, typename Of>
Status launch_few_typed(const ReduceParams& p, const Of& of, cudaStream_t stream) {
  const auto lies_in = [](const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
  const int64_t positions = p.outer * p.inner;
  // Where they are few, more threads are worth more than more loads of a thread.
  const bool vectors =
      p.inner % 4 == 0 && lies_in(p.x, 4 * sizeof(T)) && lies_in(p.y, 4 * sizeof(T)) && positions >= int64_t(1) << 18;
  const bool many = positions >= int64_t(1) << 20;
  if (vectors) return many ? launch_few<T, 4, 2, 1>(p, of, stream) : launch_few<T, 4, 1, 1>(p, of, stream);
  if (positions < int64_t(1) << 17 && p.reduced > 2 * kFewAtOnce) return launch_few<T, 1, 1, 8>(p, of, stream);
  return many ? launch_few<T, 1, 4, 1>(p, of, stream) : launch_few<T, 1, 1, 1>(p, of, stream);
}

template <typename Of>
Status launch_few_dtype(const ReduceParams& p, const Of& of, cudaStream_t stream) {
  switch (p.dtype) {
    case Dtype::kBFloat16: return launch_few_typed<__nv_bfloat16>(p, of, stream);
    case Dtype::kFloat16: return launch_few_typed<__half>(p, of, stream);
    case Dtype::kFloat32: return launch_few_typed<float>(p, of, stream);
    default: return Status::Unsupported("logsumexp_few_kernel", "float64");
  }
}

// All of a row at -inf gives NaN, as in PyTorch.
struct LogsumexpGradient {
  static constexpr bool kReads = true;
  template <typename Acc>
  __device__ Acc operator()(Acc dy, Acc y, Acc x) const {
    return dy * exp(x - y);
  }
};

}  // namespace

Status run_logsumexp(const ReduceParams& p, cudaStream_t stream) {
  const bool few = p.dtype != Dtype::kFloat64 && p.slices == 1 && p.reduced >= 1 && p.reduced <= kFewChannels &&
                   p.inner >= kFewThreads && p.outer > 0 && p.outer * p.inner <= int64_t(1) << 38;
  if (few) return launch_few_dtype(p, Plain(), stream);
  return launch_reduction<LogsumexpState>("logsumexp_kernel", p, stream);
}

Status run_norm_residual_logsumexp(const ReduceParams& p, const void* table, const void* shift, Dtype shift_dtype,
                                   cudaStream_t stream) {
  return launch_few_dtype(p, ResidualOfNorm{static_cast<const float4*>(table), shift, shift_dtype}, stream);
}

Status run_logsumexp_backward(const ReduceBackwardParams& p, cudaStream_t stream) {
  return launch_reduce_backward<LogsumexpGradient>("logsumexp_backward_kernel", p, stream);
}

}  // namespace kgopt
