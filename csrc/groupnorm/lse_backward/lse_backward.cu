// With xhat = (x - mean) rstd, z = xhat weight + bias, r = x + hardswish(tanh(z)), e = exp(r - max_channels x):
//   p  = dlse e / sum_channels e                                  the gradient of r
//   dz = p (1 - tanh(z)^2) (tanh(z) / 3 + 1/2)                    |tanh| < 3: hardswish's middle piece
//   dx = p + rstd (weight dz - (sum_group weight dz + xhat sum_group weight dz xhat) / m)
// The forward's logsumexp is of no use here: x is a convolution computed again, by another kernel or rounded to a half
// type, which at 1e5 moves it by up to 256 and exp(r - lse) out of range.
//
// Three passes over x that compute e alike: the first gives dlse / sum and the maximum, the second adds up dz, the
// third stores dx. A thread's tile is a vector along the innermost dim and kSteps steps along the other one; it reads
// what belongs to a position once for all the channels it has.
#include "groupnorm/lse_backward/lse_backward.h"

#include "common/device/traverse.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {
namespace {

inline constexpr int kThreads = kTraverseThreads, kWarps = kThreads / 32;
inline constexpr int kChannelSteps = kLseChannelSteps, kPositionSteps = kLsePositionSteps;
// Of vectors; float64 has none.
template <typename T>
inline constexpr int kWide = std::is_same_v<T, double> ? 1 : kLseVector;

__device__ __forceinline__ double tanh_of(double z) { return tanh(z); }
// Within 2e-7 of tanh: what is relative to a small tanh is added to x.
__device__ __forceinline__ float tanh_of(float z) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * 2.88539008f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  return 1.f - 2.f * s;
}

template <typename Acc>
struct Position {
  Acc share, shift;  // dlse / sum, the largest x
};

template <typename Acc>
__device__ __forceinline__ Acc shift_of(Acc largest) {
  return largest == -Acc(INFINITY) ? Acc(0) : largest;  // a position of -inf alone: zeros, not NaN
}

// A sum of e over some channels, with the largest x of these as its shift. NaN is no maximum, but comes into the sum.
template <typename Acc>
struct ExpSum {
  Acc largest, sum;

  static __device__ __forceinline__ ExpSum none() { return {-Acc(INFINITY), Acc(0)}; }
  // Shifts by `other` from now on, where it is larger.
  __device__ __forceinline__ void raise(Acc other) {
    const Acc before = largest;
    largest = max(largest, other);
    sum *= exp(before - shift_of(largest));
  }
  __device__ __forceinline__ void add(ExpSum other) {
    raise(other.largest);
    other.raise(largest);
    sum += other.sum;
  }
};

template <typename Acc>
__device__ __forceinline__ Acc share_of(Acc dlse, Acc sum) {
  return sum == Acc(0) ? Acc(0) : dlse / sum;  // the same: no gradient
}

template <typename Acc>
struct Exponential {
  Acc xhat, t, e;
};

template <typename Acc>
__device__ __forceinline__ Exponential<Acc> exponential_of(const AffineRow<Acc>& row, Acc shift, Acc x) {
  Exponential<Acc> r;
  r.xhat = (x - row.mean) * row.rstd;
  r.t = tanh_of(r.xhat * row.weight + row.bias);
  // x and the shift may be large and near each other: their difference first.
  r.e = exp((x - shift) + r.t * (r.t + Acc(3)) * Acc(1.0 / 6));
  return r;
}

template <typename Acc>
struct Terms {
  Acc xhat, p, dz;
};

template <typename Acc>
__device__ __forceinline__ Terms<Acc> terms_of(const AffineRow<Acc>& row, const Position<Acc>& at, Acc x) {
  const auto [xhat, t, e] = exponential_of(row, at.shift, x);
  const Acc p = at.share * e;
  return {xhat, p, p * (Acc(1) - t * t) * (t * Acc(1.0 / 3) + Acc(0.5))};
}

// What dx takes of a channel: its row of the table and its group's two terms.
template <typename Acc>
struct Channel {
  AffineRow<Acc> row;
  Acc term, term_xhat;

  __device__ __forceinline__ Acc gradient(const Terms<Acc>& t) const {
    return t.p + row.rstd * (row.weight * t.dz - (term + t.xhat * term_xhat));
  }
};

template <typename Acc, bool kStore>
__device__ __forceinline__ Channel<Acc> channel_of(const NormLseBackwardParams& p, int64_t n, int64_t c) {
  const GroupNormDims& d = p.dims;
  Channel<Acc> k{};
  if (c >= d.c) return k;
  if constexpr (kStore) {
    const GradientRow<Acc> r = static_cast<const GradientRow<Acc>*>(p.rows)[n * d.c + c];
    k = {r.affine, r.term, r.term_xhat};
  } else {
    k.row = make_affine_row<Acc>(p.affine, n, c);
  }
  return k;
}

// The first pass where x is contiguous: a block takes all channels of a vector of positions for each lane, its warps
// kChannelSteps of them at a time.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, 4)
    norm_lse_share_rows_kernel(const __grid_constant__ NormLseBackwardParams p) {
  using Acc = acc_t<T>;
  constexpr int kTile = 32 * kVec, kChannels = kWarps * kChannelSteps;
  __shared__ AffineRow<Acc> rows[kChannels];
  __shared__ ExpSum<Acc> shared[kWarps][kTile];
  wait_for_prerequisites();
  let_dependents_start();
  const GroupNormDims& d = p.dims;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tiles = (d.s + kTile - 1) / kTile, n = blockIdx.x / tiles;
  const int64_t at = blockIdx.x % tiles * kTile + lane * kVec;
  const bool valid = at < d.s;
  const T* const x = static_cast<const T*>(p.x) + n * d.c * d.s + at;
  ExpSum<Acc> sums[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) sums[j] = ExpSum<Acc>::none();
  for (int64_t base = 0; base < d.c; base += kChannels) {
    const int64_t first = base + warp * kChannelSteps;
    const int count = valid ? static_cast<int>(min(int64_t(kChannelSteps), d.c - first)) : 0;
    Vec<T, kVec> xs[kChannelSteps];
#pragma unroll
    for (int i = 0; i < kChannelSteps; ++i) {
      if (i < count) xs[i] = load_vec<T, kVec>(x + (first + i) * d.s);
    }
    if (base > 0) __syncthreads();
    if (threadIdx.x < kChannels && base + threadIdx.x < d.c) {
      rows[threadIdx.x] = make_affine_row<Acc>(p.affine, n, base + threadIdx.x);
    }
    __syncthreads();
    Acc largest[kVec], values[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) largest[j] = sums[j].largest;
#pragma unroll
    for (int i = 0; i < kChannelSteps; ++i) {
      if (i >= count) break;
      unpack(xs[i], values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) largest[j] = max(largest[j], values[j]);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums[j].raise(largest[j]);
#pragma unroll
    for (int i = 0; i < kChannelSteps; ++i) {
      if (i >= count) break;
      const AffineRow<Acc> row = rows[warp * kChannelSteps + i];
      unpack(xs[i], values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j].sum += exponential_of(row, shift_of(sums[j].largest), values[j]).e;
    }
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) shared[warp][lane + j * 32] = sums[j];
  __syncthreads();
  if (warp != 0 || !valid) return;
  const Vec<Acc, kVec> dlse = load_vec<Acc, kVec>(static_cast<const Acc*>(p.dlse) + n * d.s + at);
  Vec<Acc, kVec> shares, shifts;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    for (int w = 1; w < kWarps; ++w) sums[j].add(shared[w][lane + j * 32]);
    shares.v[j] = share_of(dlse.v[j], sums[j].sum);
    shifts.v[j] = shift_of(sums[j].largest);
  }
  store_result<Acc, kVec>(static_cast<Acc*>(p.shares) + n * d.s + at, shares);
  store_result<Acc, kVec>(static_cast<Acc*>(p.shifts) + n * d.s + at, shifts);
}

// The same for channels_last: `lanes` threads of a warp, a power of two, take the channels of a position.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, 2)
    norm_lse_share_columns_kernel(const __grid_constant__ NormLseBackwardParams p, int lanes) {
  using Acc = acc_t<T>;
  wait_for_prerequisites();
  let_dependents_start();
  const GroupNormDims& d = p.dims;
  const int lane = threadIdx.x % lanes, walker = threadIdx.x / lanes, walkers = kThreads / lanes;
  const int64_t slice = blockIdx.x % p.plan.share_slices, n = blockIdx.x / p.plan.share_slices;
  const T* const x = static_cast<const T*>(p.x) + n * d.s * d.c;
  const int64_t step = int64_t(walkers) * kPositionSteps;
  const int64_t end = min((slice + 1) * p.plan.share_slice_length, d.s);
  AffineRow<Acc> rows[kVec];
  int64_t loaded = -1;  // the channel of rows[0]
  for (int64_t base = slice * p.plan.share_slice_length; base < end; base += step) {
    ExpSum<Acc> sums[kPositionSteps];
#pragma unroll
    for (int i = 0; i < kPositionSteps; ++i) sums[i] = ExpSum<Acc>::none();
    for (int64_t channel = lane * kVec; channel < d.c; channel += lanes * kVec) {
      Vec<T, kVec> xs[kPositionSteps];
#pragma unroll
      for (int i = 0; i < kPositionSteps; ++i) {
        const int64_t position = base + walker + i * walkers;
        if (position < end) xs[i] = load_vec<T, kVec>(x + position * d.c + channel);
      }
      if (channel != loaded) {
        loaded = channel;
#pragma unroll
        for (int j = 0; j < kVec; ++j) rows[j] = make_affine_row<Acc>(p.affine, n, channel + j);
      }
#pragma unroll
      for (int i = 0; i < kPositionSteps; ++i) {
        const int64_t position = base + walker + i * walkers;
        if (position >= end) break;
        Acc values[kVec];
        unpack(xs[i], values);
        Acc largest = values[0];
#pragma unroll
        for (int j = 1; j < kVec; ++j) largest = max(largest, values[j]);
        sums[i].raise(largest);
        const Acc shift = shift_of(sums[i].largest);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[i].sum += exponential_of(rows[j], shift, values[j]).e;
      }
    }
#pragma unroll
    for (int i = 0; i < kPositionSteps; ++i) {
      for (int reach = lanes / 2; reach > 0; reach /= 2) {
        sums[i].add({__shfl_xor_sync(~0u, sums[i].largest, reach), __shfl_xor_sync(~0u, sums[i].sum, reach)});
      }
      const int64_t position = base + walker + i * walkers;
      if (lane == 0 && position < end) {
        const int64_t to = n * d.s + position;
        static_cast<Acc*>(p.shares)[to] = share_of(static_cast<const Acc*>(p.dlse)[to], sums[i].sum);
        static_cast<Acc*>(p.shifts)[to] = shift_of(sums[i].largest);
      }
    }
  }
}

// Contiguous: a block takes kChannelSteps channels of a sample and a slice of the positions. Of two passes one goes
// backwards, since the one before has left the end of x in L2.
template <typename T, int kVec, bool kStore>
__global__ void __launch_bounds__(kThreads, 2) norm_lse_rows_kernel(const __grid_constant__ NormLseBackwardParams p) {
  using Acc = acc_t<T>;
  __shared__ Channel<Acc> channels[kChannelSteps];
  __shared__ Acc shared[kWarps][kChannelSteps * 2];
  wait_for_prerequisites();
  let_dependents_start();
  const GroupNormDims& d = p.dims;
  const int64_t chunks = (d.c + kChannelSteps - 1) / kChannelSteps;
  const int64_t block = kStore ? int64_t(blockIdx.x) : int64_t(gridDim.x) - 1 - blockIdx.x;
  const int64_t slice = block % p.slices, n = block / p.slices / chunks;
  const int64_t first = block / p.slices % chunks * kChannelSteps;
  const int count = static_cast<int>(min(int64_t(kChannelSteps), d.c - first));
  if (threadIdx.x < kChannelSteps) channels[threadIdx.x] = channel_of<Acc, kStore>(p, n, first + threadIdx.x);
  __syncthreads();
  const int64_t row = (n * d.c + first) * d.s;
  const T* const x = static_cast<const T*>(p.x) + row;
  T* const dx = static_cast<T*>(p.dx) + row;
  const Acc* const shares = static_cast<const Acc*>(p.shares) + n * d.s;
  const Acc* const shifts = static_cast<const Acc*>(p.shifts) + n * d.s;
  const int64_t end = min((slice + 1) * p.slice_length, d.s);
  Acc sums[kChannelSteps][2] = {};
  for (int64_t at = slice * p.slice_length + threadIdx.x * kVec; at < end; at += kThreads * kVec) {
    Vec<T, kVec> xs[kChannelSteps];
#pragma unroll
    for (int i = 0; i < kChannelSteps; ++i) {
      if (i < count) xs[i] = load_vec<T, kVec>(x + i * d.s + at);
    }
    const Vec<Acc, kVec> g = load_vec<Acc, kVec>(shares + at), l = load_vec<Acc, kVec>(shifts + at);
    Position<Acc> here[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) here[j] = {g.v[j], l.v[j]};
#pragma unroll
    for (int i = 0; i < kChannelSteps; ++i) {
      if (i >= count) break;
      const Channel<Acc> k = channels[i];
      Acc values[kVec];
      unpack(xs[i], values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Terms<Acc> t = terms_of(k.row, here[j], values[j]);
        if constexpr (kStore) {
          values[j] = k.gradient(t);
        } else {
          sums[i][0] += t.dz;
          sums[i][1] += t.dz * t.xhat;
        }
      }
      if constexpr (kStore) store_result<T, kVec>(dx + i * d.s + at, pack<T, kVec>(values));
    }
  }
  if constexpr (!kStore) {
#pragma unroll
    for (int i = 0; i < kChannelSteps * 2; ++i) {
      const Acc sum = warp_sum(sums[i / 2][i % 2]);
      if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][i] = sum;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count * 2) {
      Acc sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared[w][threadIdx.x];
      static_cast<Acc*>(p.partial_sums)[((n * p.slices + slice) * d.c + first) * 2 + threadIdx.x] = sum;
    }
  }
}

// channels_last: a thread has kVec channels and walks over the positions of a slice.
template <typename T, int kVec, bool kStore>
__global__ void __launch_bounds__(kThreads, 2)
    norm_lse_columns_kernel(const __grid_constant__ NormLseBackwardParams p, ColumnGeometry geometry) {
  using Acc = acc_t<T>;
  __shared__ Acc shared[kThreads * kVec * 2];
  wait_for_prerequisites();
  let_dependents_start();
  const GroupNormDims& d = p.dims;
  const int lane = threadIdx.x % geometry.lanes, walker = threadIdx.x / geometry.lanes;
  const int64_t block = kStore ? int64_t(blockIdx.x) : int64_t(gridDim.x) - 1 - blockIdx.x;
  const int64_t columns = int64_t(geometry.lanes) * kVec, first = block % geometry.channel_blocks * columns;
  const int64_t slice = block / geometry.channel_blocks % p.slices;
  const int64_t n = block / geometry.channel_blocks / p.slices;
  const int64_t channel = first + lane * kVec;
  Acc sums[kVec][2] = {};
  if (walker < geometry.walkers && channel < d.c) {
    Channel<Acc> k[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) k[j] = channel_of<Acc, kStore>(p, n, channel + j);
    const T* const x = static_cast<const T*>(p.x) + n * d.s * d.c + channel;
    T* const dx = static_cast<T*>(p.dx) + n * d.s * d.c + channel;
    const Acc* const shares = static_cast<const Acc*>(p.shares) + n * d.s;
    const Acc* const shifts = static_cast<const Acc*>(p.shifts) + n * d.s;
    const int64_t end = min((slice + 1) * p.slice_length, d.s);
    for (int64_t at = slice * p.slice_length + walker; at < end; at += int64_t(geometry.walkers) * kPositionSteps) {
      Vec<T, kVec> xs[kPositionSteps];
      Position<Acc> here[kPositionSteps];
#pragma unroll
      for (int i = 0; i < kPositionSteps; ++i) {
        const int64_t position = at + int64_t(i) * geometry.walkers;
        if (position < end) {
          xs[i] = load_vec<T, kVec>(x + position * d.c);
          here[i] = {shares[position], shifts[position]};
        }
      }
#pragma unroll
      for (int i = 0; i < kPositionSteps; ++i) {
        const int64_t position = at + int64_t(i) * geometry.walkers;
        if (position >= end) break;
        Acc values[kVec];
        unpack(xs[i], values);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const Terms<Acc> t = terms_of(k[j].row, here[i], values[j]);
          if constexpr (kStore) {
            values[j] = k[j].gradient(t);
          } else {
            sums[j][0] += t.dz;
            sums[j][1] += t.dz * t.xhat;
          }
        }
        if constexpr (kStore) store_result<T, kVec>(dx + position * d.c, pack<T, kVec>(values));
      }
    }
  }
  if constexpr (!kStore) {
#pragma unroll
    for (int i = 0; i < kVec * 2; ++i) shared[threadIdx.x * kVec * 2 + i] = sums[i / 2][i % 2];
    __syncthreads();
    for (int64_t i = threadIdx.x; i < columns * 2 && first * 2 + i < d.c * 2; i += kThreads) {
      Acc sum = 0;
      for (int w = 0; w < geometry.walkers; ++w) sum += shared[w * columns * 2 + i];
      static_cast<Acc*>(p.partial_sums)[((n * p.slices + slice) * d.c + first) * 2 + i] = sum;
    }
  }
}

template <typename T, bool kStore>
Status launch_pass(const char* name, const NormLseBackwardParams& p, cudaStream_t stream) {
  const bool vectors = p.plan.vector == kLseVector;
  const unsigned grid = static_cast<unsigned>(p.plan.blocks);
  if (p.dims.channels_last) {
    const ColumnGeometry& g = p.plan.columns;
    return vectors
               ? launch_after<norm_lse_columns_kernel<T, kWide<T>, kStore>>(true, name, grid, kThreads, stream, p, g)
               : launch_after<norm_lse_columns_kernel<T, 1, kStore>>(true, name, grid, kThreads, stream, p, g);
  }
  return vectors ? launch_after<norm_lse_rows_kernel<T, kWide<T>, kStore>>(true, name, grid, kThreads, stream, p)
                 : launch_after<norm_lse_rows_kernel<T, 1, kStore>>(true, name, grid, kThreads, stream, p);
}

template <typename T>
Status launch_shares(const NormLseBackwardParams& p, cudaStream_t stream) {
  static constexpr char kName[] = "norm_lse_shares_kernel";
  const bool vectors = p.plan.vector == kLseVector;
  const unsigned grid = static_cast<unsigned>(p.plan.share_blocks);
  if (p.dims.channels_last) {
    const int lanes = p.plan.share_lanes;
    return vectors
               ? launch_after<norm_lse_share_columns_kernel<T, kWide<T>>>(true, kName, grid, kThreads, stream, p, lanes)
               : launch_after<norm_lse_share_columns_kernel<T, 1>>(true, kName, grid, kThreads, stream, p, lanes);
  }
  return vectors ? launch_after<norm_lse_share_rows_kernel<T, kWide<T>>>(true, kName, grid, kThreads, stream, p)
                 : launch_after<norm_lse_share_rows_kernel<T, 1>>(true, kName, grid, kThreads, stream, p);
}

}  // namespace

Status run_norm_lse_backward(const NormLseBackwardParams& p, cudaStream_t stream) {
  if (p.dims.numel() == 0) return Status::Ok();
  if (p.plan.refusal) return Status::Unsupported("norm_lse_backward", p.plan.refusal);
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, { status = launch_shares<T>(p, stream); });
  if (!status.ok()) return status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, { status = launch_pass<T, false>("norm_lse_sums_kernel", p, stream); });
  if (!status.ok()) return status;
  status = run_group_norm_passes_bwd_merge(p, stream);
  if (!status.ok()) return status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, { status = launch_pass<T, true>("norm_lse_dx_kernel", p, stream); });
  return status;
}

}  // namespace kgopt
