// Backward of act(GroupNorm(pre_act(x))): channel sums, their merge into the two terms of a group and into dweight and
// dbias, then dx. The activation's derivative is recomputed from x. With u = pre_act(x), xhat = (u - mean) rstd,
// z = xhat weight + bias, dz = dy act'(z) (Wu and He 2018, differentiated):
//   dx = pre_act'(x) rstd (weight dz - (sum_group weight dz + xhat sum_group weight dz xhat) / m)
#include "common/device/dependent_launch.cuh"
#include "common/device/floor.cuh"
#include "common/device/traverse.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/lse_backward/lse_backward.h"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {
namespace {

template <typename Acc>
struct alignas(2 * sizeof(Acc)) TwoSums {
  Acc dz = 0, dz_xhat = 0;
};

// None, ReLU and LeakyReLU behind the norm, and ReLU in front of it, share an instance, <kLeakyRelu, kLeakyRelu>.
constexpr bool is_floored(Chain pre, Chain act) {
  return pre != Chain::kAny && (act == Chain::kNone || act == Chain::kRelu || act == Chain::kLeakyRelu);
}

template <typename T, Chain kPre, Chain kAct>
struct ChannelSumsReducer {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = 2;
  static constexpr int kValues = 2;
  static constexpr bool kWalks = kPre == Chain::kAny && kAct == Chain::kAny, kHasScalars = kWalks;
  static constexpr bool kFloored = is_floored(kPre, kAct);
  using Coef = DistanceRow<Acc>;
  using State = TwoSums<Acc>;  // the second of dz times the distance
  using Partial = TwoSums<Acc>;
  AffineSource affine;
  ActChain pre, act;

  __device__ Coef load(int64_t row) const { return make_distance_row<Acc>(affine, row); }
  __device__ State start(const Coef&, Acc) const { return {}; }
  template <int kSize, typename StateOf, typename CoefOf>
  __device__ __forceinline__ void add(StateOf state, CoefOf coef, Acc (&x)[kSize], Acc (&dy)[kSize]) const {
    Acc z[kSize];
    if constexpr (kFloored) {
      apply_chain<Chain::kRelu, kIsCoarse<T>>(floored(pre), x);
    } else {
      apply_chain<kPre, kIsCoarse<T>>(pre, x);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      x[j] -= coef(j).mean;
      z[j] = x[j] * coef(j).scale + coef(j).bias;
    }
    if constexpr (kFloored) {
      multiply_slopes<kAct, kIsCoarse<T>>(floored(act), z, dy);
    } else {
      multiply_slopes<kAct, kIsCoarse<T>>(act, z, dy);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      state(j).dz += dy[j];
      state(j).dz_xhat += dy[j] * x[j];
    }
  }
  __device__ Partial finish(const State& s, const Coef& coef, Acc) const { return {s.dz, s.dz_xhat * coef.rstd}; }
  static __device__ void merge(Partial& a, const Partial& b) {
    a.dz += b.dz;
    a.dz_xhat += b.dz_xhat;
  }
};

template <typename T, Chain kPre, Chain kAct, bool kDyPerSample>
struct InputGradient {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = kDyPerSample ? 1 : 2;
  static constexpr bool kWalks = kPre == Chain::kAny && kAct == Chain::kAny, kHasScalars = kDyPerSample || kWalks;
  static constexpr bool kFloored = !kDyPerSample && is_floored(kPre, kAct);
  using Coef = GradientRow<Acc>;
  const Coef* rows;
  ActChain pre, act;

  __device__ Coef load(int64_t row) const { return rows[row]; }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf coef, const Acc (&x)[kSize], const Acc (&dy)[kSize],
                                        Acc (&dx)[kSize]) const {
    Acc slope[kSize], xhat[kSize], z[kSize], dz[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      xhat[j] = x[j];
      slope[j] = Acc(1);
    }
    std::conditional_t<kFloored, bool[kSize], Stopped<kPre, kSize>> stopped;
    if constexpr (kFloored) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) stopped[j] = x[j] <= floored(pre).stop;
      apply_chain<Chain::kRelu, kIsCoarse<T>>(floored(pre), xhat);
    } else {
      stopped = chain_slopes<kPre, kIsCoarse<T>, true>(pre, xhat, slope);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const Coef& k = coef(j);
      xhat[j] = (xhat[j] - k.affine.mean) * k.affine.rstd;
      z[j] = xhat[j] * k.affine.weight + k.affine.bias;
      if (!kDyPerSample) dz[j] = dy[j];
    }
    if constexpr (kFloored) {
      multiply_slopes<kAct, kIsCoarse<T>>(floored(act), z, dz);
    } else if constexpr (!kDyPerSample) {
      multiply_slopes<kAct, kIsCoarse<T>>(act, z, dz);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const Coef& k = coef(j);
      const Acc off = k.term + xhat[j] * k.term_xhat;
      const Acc d = slope[j] * k.affine.rstd * (kDyPerSample ? -off : k.affine.weight * dz[j] - off);
      dx[j] = stopped[j] ? Acc(0) : d;
    }
  }
};

// The same where there is no activation.
template <typename T>
struct NormGradient {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = 2;
  static constexpr bool kWalks = false, kHasScalars = false;
  struct Coef {
    Acc mean, scale, slope, offset;
  };
  const GradientRow<Acc>* rows;

  __device__ Coef load(int64_t row) const {
    const GradientRow<Acc> r = rows[row];
    const Acc rstd = r.affine.rstd;
    return {r.affine.mean, rstd * r.affine.weight, -rstd * rstd * r.term_xhat, -rstd * r.term};
  }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf coef, const Acc (&x)[kSize], const Acc (&dz)[kSize],
                                        Acc (&dx)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      dx[j] = dz[j] * coef(j).scale + ((x[j] - coef(j).mean) * coef(j).slope + coef(j).offset);
    }
  }
};

// dy constant over a sample: the sums follow from the channel means.
template <typename Acc>
__global__ void __launch_bounds__(256) mean_channel_sums_kernel(const __grid_constant__ GroupNormPassesBwdParams p) {
  let_dependents_start();
  const GroupNormDims& d = p.dims;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < d.n * d.c;
       i += int64_t(gridDim.x) * blockDim.x) {
    const AffineRow<Acc> row = make_affine_row<Acc>(p.affine, i / d.c, i % d.c);
    const Acc dz = static_cast<const Acc*>(p.dout)[i / d.c] / Acc(d.c);  // summed over the S positions
    Acc* const out = static_cast<Acc*>(p.partial_sums) + i * 2;
    out[0] = dz;
    out[1] = dz * (static_cast<const Acc*>(p.channel_mean)[i] - row.mean) * row.rstd;
  }
}

// Sums over the threads that share tid % width, valid in the first `width` threads. count: of what these walked over;
// walkers beyond it have nothing.
inline constexpr int kMergeThreads = 1024;

template <typename Acc>
__device__ __forceinline__ void sum_over_walkers(TwoSums<Acc>& v, int width_log2, int64_t count,
                                                 Acc (*shared)[kMergeThreads]) {
  const int tid = threadIdx.x, walker = tid >> width_log2;
  int walkers = blockDim.x >> width_log2;
  while (walkers / 2 >= count) walkers /= 2;
  for (int half = walkers / 2; half > 0; half /= 2) {
    shared[0][tid] = v.dz;
    shared[1][tid] = v.dz_xhat;
    __syncthreads();
    if (walker < half) {
      v.dz += shared[0][tid + (half << width_log2)];
      v.dz_xhat += shared[1][tid + (half << width_log2)];
    }
    __syncthreads();
  }
}

// A block takes a few channels and has many threads for the samples of each, whose sums it adds in a fixed order.
inline constexpr int kGradientChannelsLog2 = 3, kGradientChannels = 1 << kGradientChannelsLog2, kGradientThreads = 256;

// What is left of two passes over x, in one launch. The first N * G blocks have a group each: channel sums over the
// slices, the group's two terms, and its rows for dx. The others have a few channels of all samples, or with parameters
// by sample a few of one: dweight and dbias. `width` threads have a channel each, and blockDim / width walk over its
// sums, so that neighbours read neighbours.
template <typename Acc>
__global__ void __launch_bounds__(kMergeThreads)
    group_norm_passes_bwd_merge_kernel(const __grid_constant__ GroupNormPassesBwdParams p, int width_log2) {
  __shared__ Acc shared[2][kMergeThreads];
  const GroupNormDims& d = p.dims;
  const int tid = threadIdx.x;
  const int64_t block = blockIdx.x, groups = d.n * d.g, channels = d.c / d.g;
  const int64_t n = block / d.g, first = (block - n * d.g) * channels;
  // The sums' pass writes none of this, and the kernels ahead of it have ended.
  AffineRow<Acc> own{};
  if (block < groups && tid < channels) own = make_affine_row<Acc>(p.affine, n, first + tid);
  wait_for_prerequisites();
  let_dependents_start();
  const auto row_of = [&](int64_t i) { return i == tid ? own : make_affine_row<Acc>(p.affine, n, first + i); };
  // Of `count` slices from slice `first` on.
  const auto add_up = [&](int64_t first, int64_t channel, int64_t count, int log2) {
    const Acc* const from = static_cast<const Acc*>(p.partial_sums) + (first * d.c + channel) * p.partial_values;
    TwoSums<Acc> sum;
#pragma unroll 4
    for (int64_t i = tid >> log2; i < count; i += blockDim.x >> log2) {
      const Acc* const v = from + i * d.c * p.partial_values;
      sum.dz += v[0];
      sum.dz_xhat += v[1];
    }
    return sum;
  };
  if (block >= groups) {
    const int64_t c = ((block - groups) << kGradientChannelsLog2) + (tid & (kGradientChannels - 1));
    const int64_t count = d.parameters(), sample = d.by_sample ? c / d.c : 0;
    TwoSums<Acc> sum;
    const int64_t rows = d.by_sample ? p.slices : d.n * p.slices;
    if (c < count) sum = add_up(sample * p.slices, c - sample * d.c, rows, kGradientChannelsLog2);
    sum_over_walkers(sum, kGradientChannelsLog2, rows, shared);
    if (tid >= kGradientChannels || c >= count) return;
    store_as(p.dweight, c, p.affine_dtype, sum.dz_xhat);
    store_as(p.dbias, c, p.affine_dtype, sum.dz);
    return;
  }
  const int64_t width = int64_t(1) << width_log2;
  Acc term = 0, term_xhat = 0;
  for (int64_t i = tid & (width - 1); i - (tid & (width - 1)) < channels; i += width) {
    const int64_t c = first + i;
    const bool keeps = tid < width && i < channels;
    const Acc weight = keeps ? row_of(i).weight : Acc(0);
    TwoSums<Acc> sum;
    if (i < channels) sum = add_up(n * p.slices, c, p.slices, width_log2);
    sum_over_walkers(sum, width_log2, p.slices, shared);
    if (!keeps) continue;
    term += weight * sum.dz;
    term_xhat += weight * sum.dz_xhat;
  }
  const Acc elements = Acc(channels) * Acc(d.s);
  term = block_sum(term, shared[0]) / elements;
  term_xhat = block_sum(term_xhat, shared[1]) / elements;
  const Acc dz = p.dout ? static_cast<const Acc*>(p.dout)[n] / (Acc(d.c) * Acc(d.s)) : Acc(0);
  for (int64_t i = tid; i < channels; i += blockDim.x) {
    AffineRow<Acc> row = row_of(i);
    // One value: dx is zero, not 1 / sqrt(eps) times the last digits in which two kernels' slopes differ.
    if (elements == Acc(1)) row.rstd = 0;
    static_cast<GradientRow<Acc>*>(p.rows)[n * d.c + first + i] = {row, term - row.weight * dz, term_xhat, {}};
  }
}

// dweight and dbias of the ways that keep x on chip and leave channel sums of each sample.
template <typename Acc>
__global__ void __launch_bounds__(kGradientThreads)
    affine_gradient_kernel(const __grid_constant__ AffineGradientParams p) {
  constexpr int kWalkers = kGradientThreads / kGradientChannels, kWarps = kGradientThreads / 32;
  __shared__ Acc shared[2][kWarps][kGradientChannels];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t c = int64_t(blockIdx.x) * kGradientChannels + threadIdx.x % kGradientChannels;
  Acc dweight = 0, dbias = 0;
  wait_for_prerequisites();
  let_dependents_start();
  if (c < p.c) {
    const Acc* const sums = static_cast<const Acc*>(p.channel_sums) + c * 2;
#pragma unroll 4
    for (int64_t n = threadIdx.x / kGradientChannels; n < p.n; n += kWalkers) {
      dbias += sums[n * p.c * 2];
      dweight += sums[n * p.c * 2 + 1];
    }
  }
  for (int mask = kGradientChannels; mask < 32; mask *= 2) {
    dbias += __shfl_xor_sync(0xffffffffu, dbias, mask);
    dweight += __shfl_xor_sync(0xffffffffu, dweight, mask);
  }
  if (lane < kGradientChannels) {
    shared[0][warp][lane] = dbias;
    shared[1][warp][lane] = dweight;
  }
  __syncthreads();
  if (threadIdx.x >= kGradientChannels || c >= p.c) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    dbias += shared[0][w][threadIdx.x];
    dweight += shared[1][w][threadIdx.x];
  }
  store_as(p.dweight, c, p.affine_dtype, dweight);
  store_as(p.dbias, c, p.affine_dtype, dbias);
}

Status check(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, kernel, cudaGetErrorString(error)};
  return Status::Ok();
}

template <typename T, Chain kPre, Chain kAct>
Status launch_channel_sums(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  using R = ChannelSumsReducer<T, chain_for<T>(kPre), chain_for<T>(kAct)>;
  ReduceArgs<R> a{};
  a.x = static_cast<const T*>(p.x);
  a.second = static_cast<const T*>(p.dy);
  a.n = p.dims.n;
  a.rows = p.dims.c * p.turns;
  a.row_length = p.dims.s;
  a.slices = p.slices / p.turns;
  a.channels = p.dims.c;
  if (p.dims.channels_last) set_turns(p.dims.s, p.dims.c, p.turns, &a);
  a.slice_length = p.slice_length;
  a.partials = static_cast<acc_t<T>*>(p.partial_sums);
  a.r.affine = p.affine;
  a.r.pre = p.pre_act;
  a.r.act = p.act;
  if constexpr (!R::kHasScalars) {
    if (!has_reduce_vectors(a, p.dims.channels_last)) {
      return launch_channel_sums<T, Chain::kAny, Chain::kAny>(p, stream);
    }
  }
  return launch_reduce("group_norm_backward_sums_kernel", a, p.dims.channels_last, stream, true);
}

template <typename F>
ElementwiseArgs<F> args_of(const GroupNormPassesBwdParams& p) {
  using T = typename F::Element;
  ElementwiseArgs<F> a{};
  a.x = static_cast<const T*>(p.x);
  a.second = static_cast<const T*>(p.dy);
  a.y = static_cast<T*>(p.dx);
  a.n = p.dims.n;
  a.c = p.dims.c;
  a.s = p.dims.s;
  a.f.rows = static_cast<const GradientRow<acc_t<T>>*>(p.rows);
  return a;
}

inline constexpr const char* kInputGradient = "group_norm_backward_dx_kernel";

template <typename T, Chain kPre, Chain kAct, bool kDyPerSample>
Status launch_input_gradient(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  using F = std::conditional_t<kDyPerSample, InputGradient<T, kPre, kAct, true>,
                               InputGradient<T, chain_for<T>(kPre), chain_for<T>(kAct), false>>;
  ElementwiseArgs<F> a = args_of<F>(p);
  a.f.pre = p.pre_act;
  a.f.act = p.act;
  if constexpr (!F::kHasScalars) {
    if (elementwise_size(a, p.dims.channels_last) == 1) {
      return launch_input_gradient<T, Chain::kAny, Chain::kAny, false>(p, stream);
    }
  }
  return launch_elementwise(kInputGradient, a, p.dims.channels_last, stream, true);
}

template <typename T>
Status launch_norm_gradient(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    const auto a = args_of<NormGradient<T>>(p);
    if (elementwise_size(a, p.dims.channels_last) > 1) {
      return launch_elementwise(kInputGradient, a, p.dims.channels_last, stream, true);
    }
  }
  return launch_input_gradient<T, Chain::kAny, Chain::kAny, false>(p, stream);
}

template <typename Acc>
Status launch_merge(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  int width_log2 = 0;
  while (width_log2 < 10 && (int64_t(1) << width_log2) < p.dims.channels_per_group()) ++width_log2;
  // Two sums or more for a thread, a group's or, beyond a few, a channel's.
  int threads = std::max(64, 1 << width_log2);
  while (threads < kMergeThreads && threads < (p.slices << width_log2) / 2) threads *= 2;
  while (threads < kGradientThreads && threads < p.dims.n * p.slices * 2) threads *= 2;
  const int64_t blocks = p.dims.n * p.dims.g + (p.dims.parameters() + kGradientChannels - 1) / kGradientChannels;
  const char* const name = "group_norm_passes_bwd_merge_kernel";
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many groups for one launch");
  return launch_after<group_norm_passes_bwd_merge_kernel<Acc>>(true, name, static_cast<unsigned>(blocks), threads,
                                                               stream, p, width_log2);
}

template <typename Acc>
Status launch_mean_channel_sums(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>((p.dims.n * p.dims.c + 255) / 256, 4096));
  mean_channel_sums_kernel<Acc><<<blocks, 256, 0, stream>>>(p);
  return check("mean_channel_sums_kernel");
}

}  // namespace

void plan_group_norm_passes_bwd(GroupNormPassesBwdParams* p, int sm_count) {
  const GroupNormDims& d = p->dims;
  if (p->dy == nullptr) {
    p->slices = 1;
    p->slice_length = d.s;
    return;
  }
  const int vec = walk_size(dtype_size(d.dtype));
  if (d.channels_last) {
    plan_column_slices(d.n, d.c, d.s, vec, is_aligned(p->x) && is_aligned(p->dy), sm_count, &p->turns, &p->slices,
                       &p->slice_length);
  } else {
    plan_slices(d.n * d.c, d.s, 4096, 64, sm_count, &p->slices, &p->slice_length);
  }
}

Status run_affine_gradient(const AffineGradientParams& p, cudaStream_t stream) {
  if (p.c == 0) return Status::Ok();
  const unsigned blocks = static_cast<unsigned>((p.c + kGradientChannels - 1) / kGradientChannels);
  const char* const name = "affine_gradient_kernel";
  return p.is_double ? launch_after<affine_gradient_kernel<double>>(true, name, blocks, kGradientThreads, stream, p)
                     : launch_after<affine_gradient_kernel<float>>(true, name, blocks, kGradientThreads, stream, p);
}

Status run_group_norm_passes_bwd_merge(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  return p.dims.dtype == Dtype::kFloat64 ? launch_merge<double>(p, stream) : launch_merge<float>(p, stream);
}

Status run_group_norm_passes_bwd(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  const bool is_double = p.dims.dtype == Dtype::kFloat64;
  if (p.dims.numel() == 0) return Status::Ok();
  Status status;
  if (p.dy == nullptr) {
    status = is_double ? launch_mean_channel_sums<double>(p, stream) : launch_mean_channel_sums<float>(p, stream);
  } else {
    KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, {
      KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, {
        constexpr bool kFloored = is_floored(kPre, kAct);
        status =
            launch_channel_sums<T, kFloored ? Chain::kLeakyRelu : kPre, kFloored ? Chain::kLeakyRelu : kAct>(p, stream);
      });
    });
  }
  if (!status.ok()) return status;
  status = run_group_norm_passes_bwd_merge(p, stream);
  return status.ok() ? run_group_norm_passes_bwd_dx(p, stream) : status;
}

Status run_group_norm_passes_bwd_dx(const GroupNormPassesBwdParams& p, cudaStream_t stream) {
  Status status;
  if (p.dx == nullptr) return status;  // the rows are all that is wanted
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, {
    if (p.dy == nullptr) {
      status = launch_input_gradient<T, Chain::kNone, Chain::kNone, true>(p, stream);
    } else if (p.pre_act.empty() && p.act.empty()) {
      status = launch_norm_gradient<T>(p, stream);
    } else {
      KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, {
        constexpr bool kFloored = is_floored(kPre, kAct);
        status =
            launch_input_gradient<T, kFloored ? Chain::kLeakyRelu : kPre, kFloored ? Chain::kLeakyRelu : kAct, false>(
                p, stream);
      });
    }
  });
  return status;
}

namespace {

// dx = (x - mean) * slope + offset: the coefficients of each channel, in the normalize kernel's own table.
template <typename Acc>
__global__ void __launch_bounds__(256) stats_gradient_table_kernel(const __grid_constant__ GroupStatsBackwardParams p) {
  const GroupNormDims& d = p.dims;
  const int64_t channels = d.c / d.g;
  const Acc m = Acc(channels) * Acc(d.s);
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < d.n * d.c;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t g = i / d.c * d.g + i % d.c / channels;
    const Acc rstd = static_cast<const Acc*>(p.rstd)[g];
    AffineRow<Acc>* const row = static_cast<AffineRow<Acc>*>(p.table) + i;
    row->mean = static_cast<const Acc*>(p.mean)[g];
    row->rstd = Acc(1);
    row->weight = -static_cast<const Acc*>(p.drstd)[g] * rstd * rstd * rstd / m;
    row->bias = static_cast<const Acc*>(p.dmean)[g] / m;
  }
}

}  // namespace

Status run_group_stats_backward(const GroupStatsBackwardParams& p, cudaStream_t stream) {
  if (p.dims.numel() == 0) return Status::Ok();
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>((p.dims.n * p.dims.c + 255) / 256, 4096));
  if (p.dims.dtype == Dtype::kFloat64) {
    stats_gradient_table_kernel<double><<<blocks, 256, 0, stream>>>(p);
  } else {
    stats_gradient_table_kernel<float><<<blocks, 256, 0, stream>>>(p);
  }
  const Status status = check("stats_gradient_table_kernel");
  if (!status.ok()) return status;
  NormalizeParams n;
  n.x = p.x;
  n.y = p.dx;
  n.table = p.table;
  n.dims = p.dims;
  return run_normalize(n, stream);
}

}  // namespace kgopt
