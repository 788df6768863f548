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

constexpr int kRangeChannels = 8, kRangeThreads = 512, kRangeLoads = 4;

// A block 8 channels of a sample, whose slices its threads share. Means are merged relative to the first slice's, so
// that an offset is rounded once.
__global__ void __launch_bounds__(kRangeThreads)
    channel_ranges_kernel(const __grid_constant__ ScaledHalfParams p, int64_t slices) {
  constexpr int kWarps = kRangeThreads / 32, kWalkers = kRangeThreads / kRangeChannels;
  __shared__ RangeReducer::Partial shared[kWarps][kRangeChannels];
  const int own = threadIdx.x % kRangeChannels;
  const int64_t channel = int64_t(blockIdx.x) * kRangeChannels + own;
  const auto* const data =
      static_cast<const RangeReducer::Partial*>(p.partials) + channel / p.c * slices * p.c + channel % p.c;
  const float origin = data->moments.mean;
  RangeReducer::Partial all{{}, INFINITY, -INFINITY};
  for (int64_t slice = threadIdx.x / kRangeChannels; slice < slices; slice += kWalkers * kRangeLoads) {
    RangeReducer::Partial part[kRangeLoads];
#pragma unroll
    for (int k = 0; k < kRangeLoads; ++k) {
      if (slice + k * kWalkers < slices) part[k] = data[(slice + k * kWalkers) * p.c];
    }
#pragma unroll
    for (int k = 0; k < kRangeLoads; ++k) {
      if (slice + k * kWalkers >= slices) continue;
      part[k].moments.mean -= origin;
      RangeReducer::merge(all, part[k]);
    }
  }
  for (int mask = kRangeChannels; mask < 32; mask *= 2) {
    const auto from = [&](float v) { return __shfl_xor_sync(0xffffffffu, v, mask); };
    RangeReducer::merge(
        all, {{from(all.moments.mean), from(all.moments.m2), from(all.moments.count)}, from(all.low), from(all.high)});
  }
  if (threadIdx.x % 32 < kRangeChannels) shared[threadIdx.x / 32][own] = all;
  __syncthreads();
  if (threadIdx.x >= kRangeChannels) return;
  for (int warp = 1; warp < kWarps; ++warp) RangeReducer::merge(all, shared[warp][own]);
  p.moments[2 * channel] = all.moments.mean + origin;
  p.moments[2 * channel + 1] = all.moments.m2 / all.moments.count;
  p.range[2 * channel] = all.low;
  p.range[2 * channel + 1] = all.high;
}

// A thread a channel. The least power of two above all of its values, of all samples.
__global__ void __launch_bounds__(128) input_scales_kernel(const __grid_constant__ ScaledHalfParams p) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= p.c) return;
  const int64_t per_group = p.groups > 0 ? p.c / p.groups : 1;
  const double count = static_cast<double>(p.s);
  float largest = 0.f;
  double sum = 0;
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t channel = n * p.c + c;
    sum += p.moments[2 * channel] * count;
    if (p.mean && c % per_group == 0) {
      const float4 row = reinterpret_cast<const float4*>(p.table)[channel];
      p.mean[n * p.groups + c / per_group] = row.x;
      p.rstd[n * p.groups + c / per_group] = row.y;
    }
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
  if (p.sums) p.sums[c] = static_cast<float>(sum);
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

// Where a weight's taps lie.
struct TapOffsets {
  int64_t* offsets;
  uint32_t taps;

  __device__ TapOffsets(const ScaledHalfParams& p, int64_t* shared) : offsets(shared) {
    const uint32_t width = static_cast<uint32_t>(p.kernel[2]), height = static_cast<uint32_t>(p.kernel[1]);
    taps = static_cast<uint32_t>(p.kernel[0]) * height * width;
    for (uint32_t tap = threadIdx.x; tap < taps; tap += blockDim.x) {
      const uint32_t x = tap % width, y = tap / width % height, z = tap / width / height;
      offsets[tap] = z * p.w_stride_k[0] + y * p.w_stride_k[1] + x * p.w_stride_k[2];
    }
    __syncthreads();
  }
};

// That brings a sum of magnitudes below 2^kScaledWeightBits, where both halves are numbers of fp32: outputs beyond are
// none.
__device__ __forceinline__ double power_below(double sum, float* factors) {
  const int power = sum > 0 ? max(-250, min(250, kScaledWeightBits - 1 - ilogb(sum))) : 0;
  if (threadIdx.x == 0) {
    factors[0] = ldexpf(1.f, -(power / 2));
    factors[1] = ldexpf(1.f, -(power - power / 2));
  }
  return ldexp(1., power);
}

constexpr int kWeightThreads = 512, kWeightLoads = 4;
constexpr int64_t kMostKeptBytes = 80 << 10;  // of an output channel's weights

// A block's threads over pairs of numbers below `inner` and `outer`, neighbours over the inner ones, without divisions:
// load(i, o) for some of them, then use(i, o, value) for these.
template <typename Load, typename Use>
__device__ __forceinline__ void for_pairs(uint32_t inner, uint32_t outer, const Load& load, const Use& use) {
  int width_log2 = 0;
  while (1u << width_log2 < inner && 1 << width_log2 < kWeightThreads) ++width_log2;
  const uint32_t step = kWeightThreads >> width_log2;
  for (uint32_t i = threadIdx.x & ((1u << width_log2) - 1); i < inner; i += 1u << width_log2) {
    for (uint32_t o = threadIdx.x >> width_log2; o < outer; o += step * kWeightLoads) {
      float value[kWeightLoads];
#pragma unroll
      for (int k = 0; k < kWeightLoads; ++k) value[k] = o + k * step < outer ? load(i, o + k * step) : 0.f;
#pragma unroll
      for (int k = 0; k < kWeightLoads; ++k) {
        if (o + k * step < outer) use(i, o + k * step, value[k]);
      }
    }
  }
}

// A block an input channel.
__global__ void __launch_bounds__(kWeightThreads) weight_powers_kernel(const __grid_constant__ ScaledHalfParams p) {
  __shared__ double shared[kWeightThreads / 32];
  __shared__ int64_t offsets[kScaledMostTaps];
  const TapOffsets at(p, offsets);
  const float* const weight = p.weight + blockIdx.x * p.w_stride_in;
  double sum = 0;
  for_pairs(
      at.taps, static_cast<uint32_t>(p.c_out),
      [&](uint32_t tap, uint32_t o) { return __ldg(weight + o * p.w_stride_out + at.offsets[tap]); },
      [&](uint32_t, uint32_t o, float w) { sum += is_finite(w) ? fabs(w * __ldg(p.inverse_out + o)) : 0.; });
  const double power = power_below(block_sum(sum, shared), p.factors + 2 * blockIdx.x);
  if (threadIdx.x == 0) p.powers[blockIdx.x] = power;
}

// A block an output channel, whose weights it keeps, as they lie, where they find room: neighbours are read, and
// neighbours are written.
__global__ void __launch_bounds__(kWeightThreads)
    scaled_weights_kernel(const __grid_constant__ ScaledHalfParams p, bool keeps) {
  extern __shared__ float kept[];
  __shared__ double shared[kWeightThreads / 32];
  __shared__ int64_t offsets[kScaledMostTaps];
  const TapOffsets at(p, offsets);
  const uint32_t taps = at.taps, channels = static_cast<uint32_t>(p.c);
  const float* const weight = p.weight + blockIdx.x * p.w_stride_out;
  __half* const to = static_cast<__half*>(p.half_weight) + blockIdx.x * (int64_t(taps) * channels);
  const bool by_channel = p.w_stride_in == 1;
  const uint32_t inner = by_channel ? channels : taps, outer = by_channel ? taps : channels;
  const auto factor = [&](uint32_t c) -> double {
    if (p.powers) return p.powers[c];
    return p.largest ? scaled_input_inverse(__ldg(p.largest + c)) : p.inverse[c];
  };
  double sum = 0;
  if (keeps || !p.powers) {
    for_pairs(
        inner, outer,
        [&](uint32_t i, uint32_t o) {
          return __ldg(weight + (by_channel ? i : o) * p.w_stride_in + at.offsets[by_channel ? o : i]);
        },
        [&](uint32_t i, uint32_t o, float w) {
          if (keeps) kept[o * inner + i] = w;
          if (!p.powers && is_finite(w)) sum += fabs(w * factor(by_channel ? i : o));
        });
  }
  double own;
  if (p.powers) {
    own = p.inverse_out[blockIdx.x];
    __syncthreads();
  } else {
    own = power_below(block_sum(sum, shared), p.factors + 2 * blockIdx.x);
  }
  for_pairs(
      channels, taps,
      [&](uint32_t c, uint32_t tap) {
        return keeps ? kept[by_channel ? tap * channels + c : c * taps + tap]
                     : weight[c * p.w_stride_in + at.offsets[tap]];
      },
      [&](uint32_t c, uint32_t tap, float w) {
        const float scaled = static_cast<float>(w * factor(c) * own);
        to[tap * channels + c] = __float2half_rn(p.keeps_infinities ? scaled : or_nan(scaled));
      });
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
  if (p.n * p.c >= int64_t(1) << 32 || p.c % kRangeChannels != 0) {
    return Status::Unsupported("channel_ranges_kernel", "x has too many samples and channels, or no multiple of 8");
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
  const unsigned blocks = static_cast<unsigned>(p.n * p.c / kRangeChannels);
  return launch_after<channel_ranges_kernel>(false, "channel_ranges_kernel", blocks, kRangeThreads, stream, p,
                                             slices.count);
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

Status run_scaled_inputs(const ScaledHalfParams& p, cudaStream_t stream) {
  const unsigned channel_blocks = static_cast<unsigned>((p.c + 127) / 128);
  const Status status = launch_after<input_scales_kernel>(false, "input_scales_kernel", channel_blocks, 128, stream, p);
  if (!status.ok()) return status;
  if (!p.table) return launch_round<false, Chain::kNone>(p, stream);
  switch (norm_chain_kind(p.act)) {
    case Chain::kNone:
    case Chain::kRelu: return launch_round<true, Chain::kRelu>(p, stream);
    case Chain::kLeakyRelu: return launch_round<true, Chain::kLeakyRelu>(p, stream);
    case Chain::kSilu: return launch_round<true, Chain::kSilu>(p, stream);
    default: return launch_round<true, Chain::kAny>(p, stream);
  }
}

Status run_scaled_weights(const ScaledHalfParams& p, bool early, cudaStream_t stream) {
  const int64_t bytes = p.kernel[0] * p.kernel[1] * p.kernel[2] * p.c * int64_t(sizeof(float));
  const bool keeps = bytes <= kMostKeptBytes;
  return launch_after<scaled_weights_kernel>(early, "scaled_weights_kernel", dim3(static_cast<unsigned>(p.c_out)),
                                             kWeightThreads, keeps ? static_cast<int>(bytes) : 0, stream, p, keeps);
}

Status run_scaled_weights_by_input(const ScaledHalfParams& p, cudaStream_t stream) {
  const Status status = launch_after<weight_powers_kernel>(false, "weight_powers_kernel", static_cast<unsigned>(p.c),
                                                           kWeightThreads, stream, p);
  return status.ok() ? run_scaled_weights(p, false, stream) : status;
}

}  // namespace kgopt
