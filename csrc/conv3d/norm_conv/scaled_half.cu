// Inputs and weights of scaled_half_params.h: the range of every channel, the powers of two, and the rounding passes.
#include "conv3d/norm_conv/scaled_half.h"

#include "common/device/floor.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/traverse_padded.cuh"
#include "conv3d/norm_conv/scaled_half.cuh"

namespace kgopt {
namespace {

constexpr int kVector = walk_size(sizeof(float));

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= FLT_MAX; }

// cuDNN's fp16 kernels keep every NaN, and lose some infinities.
__device__ __forceinline__ float or_nan(float x) { return is_finite(x) ? x : NAN; }

// Moments, and the range of the finite values.
struct RangeReducer {
  using Element = float;
  static constexpr int kInputs = 1, kValues = 5;
  static constexpr bool kWalks = false, kHasScalars = false;
  struct Coef {};
  struct State {
    ShiftedSums<float> sums;
    float low, high;
  };
  struct Partial {
    Moments<float> moments;
    float low = 0, high = 0;
  };

  __device__ Coef load(int64_t) const { return {}; }
  __device__ State start(Coef, float x) const {
    State s{{}, INFINITY, -INFINITY};
    s.sums.shift = x;
    return s;
  }
  template <int kSize, typename StateOf, typename CoefOf>
  __device__ __forceinline__ void add(StateOf state, CoefOf, float (&x)[kSize], float (&)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      auto& s = state(j);
      s.sums.add(x[j]);
      s.low = fminf(s.low, is_finite(x[j]) ? x[j] : INFINITY);
      s.high = fmaxf(s.high, is_finite(x[j]) ? x[j] : -INFINITY);
    }
  }
  __device__ Partial finish(const State& s, const Coef&, float count) const {
    return {s.sums.moments(count), s.low, s.high};
  }
  static __device__ void merge(Partial& a, const Partial& b) {
    kgopt::merge(a.moments, b.moments);
    a.low = fminf(a.low, b.low);
    a.high = fmaxf(a.high, b.high);
  }
};

struct RangeSlices {
  int64_t turns = 1, count = 1, length = 0;
};
RangeSlices slices_of(const ScaledHalfParams& p) {
  RangeSlices slices;
  plan_column_slices(p.n, p.c, p.s, kVector, true, p.sm_count, &slices.turns, &slices.count, &slices.length);
  return slices;
}

// A warp a channel of a sample. Means are merged relative to the first slice's, so that an offset is rounded once.
__global__ void __launch_bounds__(128)
    channel_ranges_kernel(const __grid_constant__ ScaledHalfParams p, int64_t slices) {
  const int lane = threadIdx.x % 32;
  const int64_t channel = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (channel >= p.n * p.c) return;
  const auto* const data =
      static_cast<const RangeReducer::Partial*>(p.partials) + channel / p.c * slices * p.c + channel % p.c;
  const float origin = data->moments.mean;
  RangeReducer::Partial all{{}, INFINITY, -INFINITY};
  for (int64_t slice = lane; slice < slices; slice += 32) {
    RangeReducer::Partial part = data[slice * p.c];
    part.moments.mean -= origin;
    RangeReducer::merge(all, part);
  }
  const Moments<float> m = warp_merge(all.moments);
  for (int mask = 16; mask > 0; mask /= 2) {
    all.low = fminf(all.low, __shfl_xor_sync(0xffffffffu, all.low, mask));
    all.high = fmaxf(all.high, __shfl_xor_sync(0xffffffffu, all.high, mask));
  }
  if (lane != 0) return;
  p.moments[2 * channel] = m.mean + origin;
  p.moments[2 * channel + 1] = m.m2 / m.count;
  p.range[2 * channel] = all.low;
  p.range[2 * channel + 1] = all.high;
}

// A thread a channel. The least power of two above all of its values, of all samples.
__global__ void __launch_bounds__(128) input_scales_kernel(const __grid_constant__ ScaledHalfParams p) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= p.c) return;
  float largest = 0.f;
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t channel = n * p.c + c;
    float low = p.range[2 * channel], high = p.range[2 * channel + 1];
    if (low > high) continue;  // no finite value
    if (p.table) {
      const float4 row = reinterpret_cast<const float4*>(p.table)[channel];
      const float a = (low - row.x) * (row.z * row.y) + row.w, b = (high - row.x) * (row.z * row.y) + row.w;
      low = fminf(a, b);
      high = fmaxf(a, b);
    }
    const float bound = largest_magnitude(p.act, low, high);
    if (bound == bound) largest = fmaxf(largest, fminf(bound, FLT_MAX));
  }
  p.scale[c] = scaled_input_scale(__float_as_uint(largest));
  p.inverse[c] = scaled_input_inverse(__float_as_uint(largest));
}

constexpr int kMagnitudeThreads = 256, kMagnitudePiece = 16 * 1024;

// A block a piece of a channel of a contiguous sample. The maximum does not depend on the order.
__global__ void __launch_bounds__(kMagnitudeThreads)
    channel_magnitudes_kernel(const __grid_constant__ ScaledHalfParams p, uint32_t* largest) {
  const int64_t pieces = (p.s + kMagnitudePiece - 1) / kMagnitudePiece;
  const int64_t row = blockIdx.x / pieces, first = (blockIdx.x - row * pieces) * kMagnitudePiece;
  const float* const x = p.x + row * p.s + first;
  const int count = static_cast<int>(min(p.s - first, int64_t(kMagnitudePiece)));
  float most = 0.f;
  const auto add = [&](float v) { most = fmaxf(most, is_finite(v) ? fabsf(v) : 0.f); };
  const int fours = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? count / 4 : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < fours; i += kMagnitudeThreads) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(x) + i);
    add(v.x), add(v.y), add(v.z), add(v.w);
  }
  for (int i = fours * 4 + threadIdx.x; i < count; i += kMagnitudeThreads) add(x[i]);
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
  if (threadIdx.x % 32 == 0 && bits > 0) atomicMax(largest + row % p.c, bits);
}

// A block an output channel.
__global__ void __launch_bounds__(256) scaled_weights_kernel(const __grid_constant__ ScaledHalfParams p) {
  __shared__ double shared[8];
  __shared__ int64_t offsets[kScaledMostTaps];
  const uint32_t taps = static_cast<uint32_t>(p.kernel[0] * p.kernel[1] * p.kernel[2]);
  const uint32_t channels = static_cast<uint32_t>(p.c);
  for (uint32_t tap = threadIdx.x; tap < taps; tap += blockDim.x) {
    const uint32_t width = static_cast<uint32_t>(p.kernel[2]), height = static_cast<uint32_t>(p.kernel[1]);
    const uint32_t x = tap % width, y = tap / width % height, z = tap / width / height;
    offsets[tap] = z * p.w_stride_k[0] + y * p.w_stride_k[1] + x * p.w_stride_k[2];
  }
  __syncthreads();
  const float* const weight = p.weight + blockIdx.x * p.w_stride_out;
  __half* const to = static_cast<__half*>(p.half_weight) + blockIdx.x * (int64_t(taps) * channels);
  // Reads are of neighbours either way. Divided once: a division an element takes longer than all else.
  const bool by_channel = p.w_stride_in == 1;
  const uint32_t inner = by_channel ? channels : taps, outer = by_channel ? taps : channels;
  const uint32_t inner_step = blockDim.x % inner, outer_step = blockDim.x / inner;
  const auto for_each = [&](auto&& use) {
    for (uint32_t i = threadIdx.x % inner, o = threadIdx.x / inner; o < outer;) {
      const uint32_t tap = by_channel ? o : i, c = by_channel ? i : o;
      use(int64_t(tap) * channels + c, c, weight[c * p.w_stride_in + offsets[tap]]);
      i += inner_step;
      o += outer_step;
      if (i >= inner) {
        i -= inner;
        ++o;
      }
    }
  };
  const auto inverse = [&](int64_t c) -> double {
    return p.largest ? scaled_input_inverse(__ldg(p.largest + c)) : p.inverse[c];
  };
  double sum = 0;
  for_each([&](int64_t, int64_t c, float w) { sum += is_finite(w) ? fabs(w * inverse(c)) : 0.; });
  sum = block_sum(sum, shared);
  // Powers whose halves are numbers of fp32; outputs beyond are none.
  const int power = sum > 0 ? max(-250, min(250, kScaledWeightBits - 1 - ilogb(sum))) : 0;
  const double unit = ldexp(1., power);
  for_each([&](int64_t at, int64_t c, float w) {
    const float scaled = static_cast<float>(w * inverse(c) * unit);
    to[at] = __float2half_rn(p.keeps_infinities ? scaled : or_nan(scaled));
  });
  if (threadIdx.x == 0) {
    p.factors[2 * blockIdx.x] = ldexpf(1.f, -(power / 2));
    p.factors[2 * blockIdx.x + 1] = ldexpf(1.f, -(power - power / 2));
  }
  wait_for_prerequisites();  // what comes behind this kernel wants the results of the one ahead, too
}

// Where a chain cancels, its rounding errors may be all that there is, and not below the bound that another order of
// operations gave.
__device__ __forceinline__ float below_bound(float x) {
  constexpr float kLargest = 1 << kScaledInputBits;
  return is_finite(x) && fabsf(x) > kLargest ? copysignf(kLargest, x) : x;
}

// The norm and its activations, scaled and rounded.
template <bool kNorm, Chain kAct>
struct RoundScaled {
  using Element = float;
  using Output = __half;
  static constexpr int kInputs = 1;
  static constexpr bool kWalks = kAct == Chain::kAny, kHasScalars = false;
  struct Coef {
    float mean, weight, bias, scale;
  };
  const float4* table;
  const float* scale;
  uint32_t channels;
  ActChain act;

  // Rows are (sample, channel) pairs; there are fewer than 2^32 of them, which the launcher checks.
  __device__ Coef load(int64_t row) const {
    const float own = scale[static_cast<uint32_t>(row) % channels];
    if constexpr (!kNorm) return {0.f, 1.f, 0.f, own};
    const float4 of_norm = table[row];
    return {of_norm.x, of_norm.y * of_norm.z, of_norm.w, own};
  }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf coef, const float (&x)[kSize], const float (&)[kSize],
                                        float (&y)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = kNorm ? (x[j] - coef(j).mean) * coef(j).weight + coef(j).bias : x[j];
    if constexpr (kNorm) apply_chain<kAct, false>(floored(act), y);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float scaled = y[j] * coef(j).scale;
      y[j] = or_nan(kAct == Chain::kAny ? below_bound(scaled) : scaled);
    }
  }
};

template <bool kNorm, Chain kAct>
Status launch_round(const ScaledHalfParams& p, cudaStream_t stream) {
  ElementwiseArgs<RoundScaled<kNorm, kAct>> a{};
  a.x = p.x;
  a.y = static_cast<__half*>(p.half_x);
  a.n = p.n;
  a.c = p.c;
  a.s = p.s;
  a.f.table = reinterpret_cast<const float4*>(p.table);
  a.f.scale = p.scale;
  a.f.channels = static_cast<uint32_t>(p.c);
  a.f.act = p.act;
  if (p.pads) {
    a.s = int64_t(p.pad.out[0]) * p.pad.out[1] * p.pad.out[2];
    return launch_elementwise_padded("round_scaled_padded_kernel", a, p.pad, stream);
  }
  return launch_elementwise("round_scaled_kernel", a, true, stream);
}

}  // namespace

int64_t scaled_half_partial_bytes(const ScaledHalfParams& p) {
  return p.n * slices_of(p).count * p.c * static_cast<int64_t>(sizeof(RangeReducer::Partial));
}

Status run_channel_ranges(const ScaledHalfParams& p, cudaStream_t stream) {
  if (p.n * p.c >= int64_t(1) << 32) {
    return Status::Unsupported("channel_ranges_kernel", "x has too many samples and channels");
  }
  const RangeSlices slices = slices_of(p);
  ReduceArgs<RangeReducer> a{};
  a.x = p.x;
  a.n = p.n;
  a.rows = p.c * slices.turns;
  a.channels = p.c;
  a.slices = slices.count / slices.turns;
  set_turns(p.s, p.c, slices.turns, &a);
  a.slice_length = slices.length;
  a.partials = static_cast<float*>(p.partials);
  const Status status = launch_reduce("channel_ranges_kernel", a, true, stream);
  if (!status.ok()) return status;
  const unsigned blocks = static_cast<unsigned>((p.n * p.c + 3) / 4);
  return launch_after<channel_ranges_kernel>(false, "channel_ranges_kernel", blocks, 128, stream, p, slices.count);
}

Status run_channel_magnitudes(const ScaledHalfParams& p, uint32_t* largest, cudaStream_t stream) {
  const char* const name = "channel_magnitudes_kernel";
  const cudaError_t error = cudaMemsetAsync(largest, 0, p.c * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  const int64_t blocks = p.n * p.c * ((p.s + kMagnitudePiece - 1) / kMagnitudePiece);
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many elements for one launch");
  return launch_after<channel_magnitudes_kernel>(false, name, static_cast<unsigned>(blocks), kMagnitudeThreads, stream,
                                                 p, largest);
}

Status run_scaled_half(const ScaledHalfParams& p, cudaStream_t stream) {
  const unsigned channel_blocks = static_cast<unsigned>((p.c + 127) / 128);
  Status status = launch_after<input_scales_kernel>(false, "input_scales_kernel", channel_blocks, 128, stream, p);
  if (status.ok()) status = run_scaled_weights(p, false, stream);
  if (!status.ok()) return status;
  if (!p.table) return launch_round<false, Chain::kNone>(p, stream);
  switch (chain_kind(p.act)) {
    case Chain::kNone:
    case Chain::kRelu: return launch_round<true, Chain::kRelu>(p, stream);
    case Chain::kSilu: return launch_round<true, Chain::kSilu>(p, stream);
    default: return launch_round<true, Chain::kAny>(p, stream);
  }
}

Status run_scaled_weights(const ScaledHalfParams& p, bool early, cudaStream_t stream) {
  return launch_after<scaled_weights_kernel>(early, "scaled_weights_kernel", static_cast<unsigned>(p.c_out), 256,
                                             stream, p);
}

}  // namespace kgopt
