// With xhat = (x - mean) rstd, z = xhat weight + bias, r = x + hardswish(tanh(z)), lse = log sum_channels exp(r):
//   p  = dlse exp(r - lse)                                        the gradient of r
//   dz = p (1 - tanh(z)^2) (tanh(z) / 3 + 1/2)                    |tanh| < 3: hardswish's middle piece
//   dx = p + rstd (weight dz - (sum_group weight dz + xhat sum_group weight dz xhat) / m)
// Two passes over x that compute p and dz alike: the first sums, the second stores. A thread's tile is a vector along
// the innermost dim and kSteps steps along the other one; it reads dlse and lse once for all the channels it has.
#include "norm_lse_backward.h"

#include "../common/traverse.cuh"
#include "affine_row.cuh"
#include "groupnorm.h"

namespace kgopt {
namespace {

inline constexpr int kThreads = kTraverseThreads, kWarps = kThreads / 32;
inline constexpr int kVector = 4;
inline constexpr int kChannelSteps = 8;   // contiguous: channels of a thread
inline constexpr int kPositionSteps = 4;  // channels_last: positions under way

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
  Acc dlse, shift;
};

template <typename Acc>
__device__ __forceinline__ Position<Acc> position_of(Acc dlse, Acc lse) {
  return {dlse, lse == -Acc(INFINITY) ? Acc(0) : lse};  // all of a row at -inf: no gradient rather than NaN
}

template <typename Acc>
struct Terms {
  Acc xhat, p, dz;
};

template <typename Acc>
__device__ __forceinline__ Terms<Acc> terms_of(const AffineRow<Acc>& row, const Position<Acc>& at, Acc x) {
  Terms<Acc> r;
  r.xhat = (x - row.mean) * row.rstd;
  const Acc t = tanh_of(r.xhat * row.weight + row.bias);
  // x and lse may be large and near each other: their difference first.
  r.p = at.dlse * exp((x - at.shift) + t * (t + Acc(3)) * Acc(1.0 / 6));
  r.dz = r.p * (Acc(1) - t * t) * (t * Acc(1.0 / 3) + Acc(0.5));
  return r;
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

// Contiguous: a block takes kChannelSteps channels of a sample and a slice of the positions. The second pass goes
// backwards, since the first one has left the end of x in L2.
template <typename T, int kVec, bool kStore>
__global__ void __launch_bounds__(kThreads, 2) norm_lse_rows_kernel(const __grid_constant__ NormLseBackwardParams p) {
  using Acc = acc_t<T>;
  __shared__ Channel<Acc> channels[kChannelSteps];
  __shared__ Acc shared[kWarps][kChannelSteps * 2];
  wait_for_prerequisites();
  let_dependents_start();
  const GroupNormDims& d = p.dims;
  const int64_t chunks = (d.c + kChannelSteps - 1) / kChannelSteps;
  const int64_t block = kStore ? int64_t(gridDim.x) - 1 - blockIdx.x : int64_t(blockIdx.x);
  const int64_t slice = block % p.slices, n = block / p.slices / chunks;
  const int64_t first = block / p.slices % chunks * kChannelSteps;
  const int count = static_cast<int>(min(int64_t(kChannelSteps), d.c - first));
  if (threadIdx.x < kChannelSteps) channels[threadIdx.x] = channel_of<Acc, kStore>(p, n, first + threadIdx.x);
  __syncthreads();
  const int64_t row = (n * d.c + first) * d.s;
  const T* const x = static_cast<const T*>(p.x) + row;
  T* const dx = static_cast<T*>(p.dx) + row;
  const Acc* const dlse = static_cast<const Acc*>(p.dlse) + n * d.s;
  const Acc* const lse = static_cast<const Acc*>(p.lse) + n * d.s;
  const int64_t end = min((slice + 1) * p.slice_length, d.s);
  Acc sums[kChannelSteps][2] = {};
  for (int64_t at = slice * p.slice_length + threadIdx.x * kVec; at < end; at += kThreads * kVec) {
    Vec<T, kVec> xs[kChannelSteps];
#pragma unroll
    for (int i = 0; i < kChannelSteps; ++i) {
      if (i < count) xs[i] = load_vec<T, kVec>(x + i * d.s + at);
    }
    const Vec<Acc, kVec> g = load_vec<Acc, kVec>(dlse + at), l = load_vec<Acc, kVec>(lse + at);
    Position<Acc> here[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) here[j] = position_of(g.v[j], l.v[j]);
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
      if constexpr (kStore) store_vec<T, kVec>(dx + i * d.s + at, pack<T, kVec>(values));
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
  const int64_t block = kStore ? int64_t(gridDim.x) - 1 - blockIdx.x : int64_t(blockIdx.x);
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
    const Acc* const dlse = static_cast<const Acc*>(p.dlse) + n * d.s;
    const Acc* const lse = static_cast<const Acc*>(p.lse) + n * d.s;
    const int64_t end = min((slice + 1) * p.slice_length, d.s);
    for (int64_t at = slice * p.slice_length + walker; at < end; at += int64_t(geometry.walkers) * kPositionSteps) {
      Vec<T, kVec> xs[kPositionSteps];
      Position<Acc> here[kPositionSteps];
#pragma unroll
      for (int i = 0; i < kPositionSteps; ++i) {
        const int64_t position = at + int64_t(i) * geometry.walkers;
        if (position < end) {
          xs[i] = load_vec<T, kVec>(x + position * d.c);
          here[i] = position_of(dlse[position], lse[position]);
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
        if constexpr (kStore) store_vec<T, kVec>(dx + position * d.c, pack<T, kVec>(values));
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

// Vectors where every row of x and of lse starts at one; float64, whose exponentials are long, has code for single
// values.
int vector_of(const NormLseBackwardParams& p) {
  if (p.dims.dtype == Dtype::kFloat64) return 1;
  const int64_t innermost = p.dims.channels_last ? p.dims.c : p.dims.s;
  const bool aligned = is_aligned(p.x) && is_aligned(p.dx) && is_aligned(p.dlse) && is_aligned(p.lse);
  return aligned && innermost % kVector == 0 ? kVector : 1;
}

template <typename T, bool kStore>
Status launch_pass(const char* name, const NormLseBackwardParams& p, cudaStream_t stream) {
  const GroupNormDims& d = p.dims;
  constexpr int kWide = std::is_same_v<T, double> ? 1 : kVector;
  const bool vectors = vector_of(p) == kVector;
  const ColumnGeometry g = column_geometry(d.c, vectors ? kVector : 1);
  const int64_t units = d.channels_last ? g.channel_blocks : (d.c + kChannelSteps - 1) / kChannelSteps;
  const int64_t blocks = d.n * units * p.slices;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many elements for one launch");
  const unsigned grid = static_cast<unsigned>(blocks);
  if (d.channels_last) {
    return vectors ? launch_after<norm_lse_columns_kernel<T, kWide, kStore>>(true, name, grid, kThreads, stream, p, g)
                   : launch_after<norm_lse_columns_kernel<T, 1, kStore>>(true, name, grid, kThreads, stream, p, g);
  }
  return vectors ? launch_after<norm_lse_rows_kernel<T, kWide, kStore>>(true, name, grid, kThreads, stream, p)
                 : launch_after<norm_lse_rows_kernel<T, 1, kStore>>(true, name, grid, kThreads, stream, p);
}

}  // namespace

void plan_norm_lse_backward(NormLseBackwardParams* p, int sm_count) {
  const GroupNormDims& d = p->dims;
  if (d.channels_last) {
    const ColumnGeometry g = column_geometry(d.c, vector_of(*p));
    plan_slices(d.n * g.channel_blocks, d.s, int64_t(g.walkers) * kPositionSteps * 2, 1, sm_count, &p->slices,
                &p->slice_length);
  } else {
    const int64_t chunks = (d.c + kChannelSteps - 1) / kChannelSteps;
    plan_slices(d.n * chunks, d.s, kThreads * kVector, kVector, sm_count, &p->slices, &p->slice_length);
  }
}

Status run_norm_lse_backward(const NormLseBackwardParams& p, cudaStream_t stream) {
  if (p.dims.numel() == 0) return Status::Ok();
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, { status = launch_pass<T, false>("norm_lse_sums_kernel", p, stream); });
  if (!status.ok()) return status;
  status = run_group_norm_backward_merge(p, stream);
  if (!status.ok()) return status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, { status = launch_pass<T, true>("norm_lse_dx_kernel", p, stream); });
  return status;
}

}  // namespace kgopt
