// Group statistics: partial moments of slices, then their merge. A group is split over as many blocks as the GPU has
// room for, whatever N * G is, and merged in a fixed order.
#include "common/device/floor.cuh"
#include "common/device/traverse.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {
namespace {

template <typename T, Chain kPre>
struct MomentsReducer {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = 1;
  static constexpr int kValues = 3;
  static constexpr bool kWalks = kPre == Chain::kAny, kHasScalars = kWalks;
  struct Coef {};
  using State = ShiftedSums<Acc>;
  using Partial = Moments<Acc>;
  ActChain pre;

  template <int kSize>
  __device__ __forceinline__ void apply(Acc (&x)[kSize]) const {
    if constexpr (has_floor(kPre)) {
      apply_chain<kPre, kIsCoarse<T>>(floored(pre), x);
    } else {
      apply_chain<kPre, kIsCoarse<T>>(pre, x);
    }
  }
  __device__ Coef load(int64_t) const { return {}; }
  __device__ State start(Coef, Acc x) const {
    State s;
    Acc value[1] = {x};
    apply(value);
    s.shift = value[0];
    return s;
  }
  template <int kSize, typename StateOf, typename CoefOf>
  __device__ __forceinline__ void add(StateOf state, CoefOf, Acc (&x)[kSize], Acc (&)[kSize]) const {
    apply(x);
#pragma unroll
    for (int j = 0; j < kSize; ++j) state(j).add(x[j]);
  }
  __device__ Partial finish(const State& s, const Coef&, Acc count) const { return s.moments(count); }
  static __device__ void merge(Partial& a, const Partial& b) { kgopt::merge(a, b); }
};

template <typename T, Chain kPre>
Status launch_stats(const GroupStatsParams& p, cudaStream_t stream) {
  const GroupNormDims& d = p.dims;
  using R = MomentsReducer<T, chain_for<T>(kPre)>;
  ReduceArgs<R> a{};
  a.x = static_cast<const T*>(p.x);
  a.n = d.n;
  const bool by_channel = d.channels_last && d.c > 1 && p.partials.rows == d.c;
  a.rows = p.partials.rows * p.turns;
  a.row_length = d.c * d.s / p.partials.rows;
  a.channels = p.partials.rows;
  a.slices = p.partials.slices / p.turns;
  if (by_channel) set_turns(d.s, d.c, p.turns, &a);
  a.slice_length = p.slice_length;
  a.partials = static_cast<acc_t<T>*>(p.partials.data);
  a.r.pre = p.pre_act;
  if constexpr (!R::kHasScalars) {
    if (!has_reduce_vectors(a, by_channel)) return launch_stats<T, Chain::kAny>(p, stream);
  }
  return launch_reduce("group_stats_kernel", a, by_channel, stream);
}

// One block a group: warps take its rows, lanes the slices of a row.
template <typename Acc>
__global__ void __launch_bounds__(256) group_stats_finalize_kernel(const __grid_constant__ GroupStatsFinalizeParams p,
                                                                   const void* shift, Dtype shift_dtype) {
  __shared__ Moments<Acc> shared[8];
  __shared__ Acc statistics[2];
  const int64_t n = blockIdx.x / p.g;
  const int64_t group = blockIdx.x % p.g;
  const int64_t rows = p.partials.rows / p.g;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t slices = p.partials.slices, channels = p.c / p.g;
  const auto parameter = [&](const void* values, int64_t i, Acc none) {
    return values ? load_as<Acc>(values, n * p.affine_stride + group * channels + i, p.affine_dtype) : none;
  };
  // The kernel ahead writes none of these, and those ahead of it have ended.
  constexpr int kAhead = 4;
  Acc weight[kAhead], bias[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int64_t i = threadIdx.x + k * 256;
    const bool wanted = p.table && i < channels;
    weight[k] = wanted ? parameter(p.weight, i, Acc(1)) : Acc(1);
    bias[k] = wanted ? parameter(p.bias, i, Acc(0)) : Acc(0);
  }
  wait_for_prerequisites();
  let_dependents_start();
  if (p.only && p.only[n] == 0) return;
  const Acc* const data = static_cast<const Acc*>(p.partials.data) + (n * slices * p.partials.rows + group * rows) * 3;
  // Entries first, first + step, ... below count; four loads are under way at a time, or their latency is all there is.
  auto merge_strided = [&](int64_t first, int64_t step, int64_t count, auto&& place) {
    Moments<Acc> m;
    for (int64_t i = first; i < count; i += 4 * step) {
      Moments<Acc> part[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j * step >= count) continue;
        const Acc* const at = data + place(i + j * step) * 3;
        part[j].mean = at[0];
        part[j].m2 = at[1];
        part[j].count = at[2];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) merge(m, part[j]);
    }
    return m;
  };
  Moments<Acc> mine;
  if (p.channel_mean) {
    for (int64_t r = warp; r < rows; r += 8) {
      Moments<Acc> m =
          warp_merge(merge_strided(lane, 32, slices, [&](int64_t slice) { return slice * p.partials.rows + r; }));
      if (shift) m.mean += load_as<Acc>(shift, group * rows + r, shift_dtype);
      if (lane == 0) static_cast<Acc*>(p.channel_mean)[n * p.c + group * rows + r] = m.mean;
      merge(mine, m);
    }
  } else {
    const int per_slice = static_cast<int>(rows);
    mine = warp_merge(merge_strided(threadIdx.x, 256, slices * rows, [&](int64_t i) {
      const uint32_t slice = static_cast<uint32_t>(i) / per_slice;
      return int64_t(slice) * p.partials.rows + (static_cast<uint32_t>(i) - slice * per_slice);
    }));
  }
  if (lane == 0) shared[warp] = mine;
  __syncthreads();
  if (warp != 0 && !p.table) return;
  if (warp == 0) mine = warp_merge(lane < 8 ? shared[lane] : Moments<Acc>());
  if (threadIdx.x == 0) {
    const Moments<Acc>& m = mine;
    const Acc rstd = Acc(1) / sqrt(m.m2 / m.count + Acc(p.eps));
    statistics[0] = m.mean;
    statistics[1] = rstd;
    if (p.mean) static_cast<Acc*>(p.mean)[blockIdx.x] = m.mean;
    if (p.rstd) static_cast<Acc*>(p.rstd)[blockIdx.x] = rstd;
  }
  if (!p.table) return;
  __syncthreads();
  const auto store_row = [&](int64_t i, Acc own_weight, Acc own_bias) {
    static_cast<AffineRow<Acc>*>(p.table)[n * p.c + group * channels + i] = {statistics[0], statistics[1], own_weight,
                                                                             own_bias};
  };
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int64_t i = threadIdx.x + k * 256;
    if (i < channels) store_row(i, weight[k], bias[k]);
  }
  for (int64_t i = threadIdx.x + kAhead * 256; i < channels; i += 256) {
    store_row(i, parameter(p.weight, i, Acc(1)), parameter(p.bias, i, Acc(0)));
  }
}

// A warp a channel. Means are merged relative to the first slice's, so that an offset is rounded once.
template <typename Acc>
__global__ void __launch_bounds__(128) channel_moments_kernel(const __grid_constant__ ChannelMomentsParams p) {
  wait_for_prerequisites();
  let_dependents_start();
  const int lane = threadIdx.x % 32;
  const int64_t channel = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (channel >= p.n * p.c) return;
  const int64_t n = channel / p.c, slices = p.partials.slices;
  const Acc* const data = static_cast<const Acc*>(p.partials.data) + (n * slices * p.c + channel % p.c) * 3;
  const Acc origin = data[0];
  Moments<Acc> m;
  for (int64_t slice = lane; slice < slices; slice += 4 * 32) {
    Moments<Acc> part[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (slice + j * 32 >= slices) continue;
      const Acc* const at = data + (slice + j * 32) * p.c * 3;
      part[j] = {at[0] - origin, at[1], at[2]};
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) merge(m, part[j]);
  }
  m = warp_merge(m);
  if (lane == 0) {
    Acc* const out = static_cast<Acc*>(p.moments) + channel * 2;
    out[0] = m.mean + origin;
    out[1] = m.m2 / m.count;
  }
}

// A warp a group; its channels count the same number of values each. What rounding takes from the mean goes into the
// biases: beside a large offset it would be the last digits of the result.
template <typename Acc>
__global__ void __launch_bounds__(128) moments_table_kernel(const __grid_constant__ MomentsTableParams p) {
  wait_for_prerequisites();
  let_dependents_start();
  const int lane = threadIdx.x % 32;
  const int64_t group = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (group >= p.n * p.g) return;
  const int64_t channels = p.c / p.g, first = group * channels;
  const Acc* const moments = static_cast<const Acc*>(p.moments) + first * 2;
  const Acc origin = moments[0];
  Acc sum = 0;
  for (int64_t i = lane; i < channels; i += 32) sum += moments[2 * i] - origin;
  const Acc offset = warp_sum(sum) / static_cast<Acc>(channels);
  Acc squares = 0;
  for (int64_t i = lane; i < channels; i += 32) {
    const Acc d = moments[2 * i] - origin - offset;
    squares += moments[2 * i + 1] + d * d;
  }
  const Acc mean = origin + offset, lost = offset - (mean - origin);
  const Acc rstd = Acc(1) / sqrt(warp_sum(squares) / static_cast<Acc>(channels) + Acc(p.eps));
  for (int64_t i = lane; i < channels; i += 32) {
    const int64_t c = (first + i) % p.c;
    Acc* const out = static_cast<Acc*>(p.table) + (first + i) * 4;
    const Acc weight = p.weight ? load_as<Acc>(p.weight, c, p.affine_dtype) : Acc(1);
    const Acc bias = p.bias ? load_as<Acc>(p.bias, c, p.affine_dtype) : Acc(0);
    out[0] = mean;
    out[1] = rstd;
    out[2] = weight;
    out[3] = bias - lost * rstd * weight;
  }
}

inline constexpr int64_t kMostBlocks = 0x7fffffff;  // of a launch

}  // namespace

void plan_group_stats(GroupStatsParams* p, bool per_channel, int sm_count) {
  const GroupNormDims& d = p->dims;
  const int vec = walk_size(dtype_size(d.dtype));
  // With one group the order of a sample's elements does not matter.
  if (d.channels_last && d.c > 1 && (per_channel || d.g > 1)) {
    p->partials.rows = d.c;
    plan_column_slices(d.n, d.c, d.s, vec, is_aligned(p->x), sm_count, &p->turns, &p->partials.slices,
                       &p->slice_length);
  } else {
    p->partials.rows = per_channel ? d.c : d.g;
    plan_slices(d.n * p->partials.rows, d.c * d.s / p->partials.rows, 4096, 64, sm_count, &p->partials.slices,
                &p->slice_length);
  }
}

Status run_group_stats(const GroupStatsParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, {
    switch (chain_kind(p.pre_act)) {
      case Chain::kNone:
      case Chain::kRelu: status = launch_stats<T, Chain::kRelu>(p, stream); break;
      default: status = launch_stats<T, Chain::kAny>(p, stream);
    }
  });
  return status;
}

Status run_group_stats_finalize(const GroupStatsFinalizeParams& p, cudaStream_t stream, const void* shift,
                                Dtype shift_dtype) {
  if (p.n == 0) return Status::Ok();
  const char* const name = "group_stats_finalize_kernel";
  if (p.n * p.g > kMostBlocks) return Status::Unsupported(name, "x has too many groups for one launch");
  const unsigned blocks = static_cast<unsigned>(p.n * p.g);
  return p.is_double
             ? launch_after<group_stats_finalize_kernel<double>>(true, name, blocks, 256, stream, p, shift, shift_dtype)
             : launch_after<group_stats_finalize_kernel<float>>(true, name, blocks, 256, stream, p, shift, shift_dtype);
}

Status run_channel_moments(const ChannelMomentsParams& p, cudaStream_t stream) {
  if (p.n * p.c == 0) return Status::Ok();
  const char* const name = "channel_moments_kernel";
  if ((p.n * p.c + 3) / 4 > kMostBlocks) return Status::Unsupported(name, "x has too many channels for one launch");
  const unsigned blocks = static_cast<unsigned>((p.n * p.c + 3) / 4);
  return p.is_double ? launch_after<channel_moments_kernel<double>>(true, name, blocks, 128, stream, p)
                     : launch_after<channel_moments_kernel<float>>(true, name, blocks, 128, stream, p);
}

Status run_moments_table(const MomentsTableParams& p, cudaStream_t stream) {
  if (p.n * p.c == 0) return Status::Ok();
  const char* const name = "moments_table_kernel";
  if ((p.n * p.g + 3) / 4 > kMostBlocks) return Status::Unsupported(name, "x has too many groups for one launch");
  const unsigned blocks = static_cast<unsigned>((p.n * p.g + 3) / 4);
  return p.is_double ? launch_after<moments_table_kernel<double>>(true, name, blocks, 128, stream, p)
                     : launch_after<moments_table_kernel<float>>(true, name, blocks, 128, stream, p);
}

}  // namespace kgopt
