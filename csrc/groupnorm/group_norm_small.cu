// GroupNorm forward and backward of small groups; see group_norm_small_params.h. The formulas of backward are those of
// group_norm_backward.cu.
#include "../common/async.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/dtype.cuh"
#include "../common/launch.h"
#include "../common/pointwise.cuh"
#include "group_norm_small_plan.h"
#include "groupnorm.h"

namespace kgopt {
namespace {

// The chains by name at run time: few elements do not pay for kernels of their own.
template <int kElements>
__device__ __forceinline__ void apply_kind(Chain kind, const ActChain& chain, float (&v)[kElements]) {
  if (kind == Chain::kNone) return;
  if (kind == Chain::kRelu) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) v[k] = apply_chain<Chain::kRelu>(chain, v[k]);
  } else if (kind == Chain::kSilu) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) v[k] = apply_chain<Chain::kSilu>(chain, v[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kElements; ++k) v[k] = apply_chain<Chain::kAny>(chain, v[k]);
  }
}

// v becomes the chain's value, and `by` is multiplied with its slope.
template <int kElements>
__device__ __forceinline__ void apply_slope(Chain kind, const ActChain& chain, float (&v)[kElements],
                                            float (&by)[kElements]) {
  if (kind == Chain::kNone) return;
  if (kind == Chain::kRelu) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) by[k] *= chain_slope<Chain::kRelu>(chain, v[k], &v[k]);
  } else if (kind == Chain::kSilu) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) by[k] *= chain_slope<Chain::kSilu>(chain, v[k], &v[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kElements; ++k) by[k] *= chain_slope<Chain::kAny>(chain, v[k], &v[k]);
  }
}

// Over `lanes` neighbouring lanes, a power of two, or over the warp.
template <int kValues>
__device__ __forceinline__ void lanes_sum(uint32_t lanes, float (&v)[kValues]) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < static_cast<int>(lanes)) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], mask);
    }
  }
}

// What a thread has of its team's unit.
template <typename Params>
struct SmallTeam {
  const Params& p;
  const SmallShares& s;
  const uint32_t tid = threadIdx.x;
  uint32_t team, lane, unit, channel0;
  uint32_t rank, first, end;  // in the cluster; elements of the unit
  bool active;
  int64_t base;

  __device__ __forceinline__ explicit SmallTeam(const Params& params) : p(params), s(params.shares) {
    team = s.by_lanes(tid);
    lane = tid - team * s.lanes;
    rank = blockIdx.x & ((1u << s.blocks_log2) - 1);
    first = rank * s.chunk;
    end = min(first + s.chunk, s.elements);
    uint32_t n, g;
    if (s.owner) {
      n = team;
      g = blockIdx.x;
      unit = n * s.by_groups.d + g;
    } else {
      unit = (blockIdx.x >> s.blocks_log2) * s.teams + team;
      n = s.by_groups(unit);
      g = unit - n * s.by_groups.d;
    }
    active = team < s.teams && unit < s.units;
    channel0 = g * s.channels;
    base = n * s.sample + g * s.stride;
  }
  __device__ __forceinline__ uint32_t element(int k) const { return first + lane + k * s.lanes; }
  __device__ __forceinline__ bool has(int k) const { return active && element(k) < end; }
  // Offset of element i from the unit's start, and its channel.
  __device__ __forceinline__ uint32_t find(uint32_t i, uint32_t* channel) const {
    const uint32_t row = s.by_minor(i), column = i - row * s.by_minor.d;
    *channel = channel0 + (s.channels_last ? column : row);
    return row * static_cast<uint32_t>(s.pitch) + column;
  }
  template <typename T>
  __device__ __forceinline__ float affine(const void* values, uint32_t c, float none) const {
    if (values == nullptr) return none;
    if (sizeof(T) == 4 || p.affine_dtype == Dtype::kFloat32) return static_cast<const float*>(values)[c];
    return to_acc(static_cast<const T*>(values)[c]);
  }
  // Over the whole team. `shared` has an entry a warp, and is written once.
  template <int kValues>
  __device__ __forceinline__ void sum(float (&v)[kValues], float (*shared)[kValues]) const {
    lanes_sum(s.lanes, v);
    if (s.lanes <= 32) return;
    if (tid % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared[tid / 32][i] = v[i];
    }
    __syncthreads();
    const uint32_t first = team * (s.lanes / 32);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    if (team >= s.teams) return;
#pragma unroll 4
    for (uint32_t w = 0; w < s.lanes / 32; ++w) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] += shared[first + w][i];
    }
  }
};

inline constexpr int kSmallMaxWarps = kSmallMaxThreads / 32;

// What the blocks of a cluster tell each other.
struct SmallBox {
  float4 parts[kSmallMaxBlocks];
  uint64_t arrived;
};

__device__ __forceinline__ void open_box(SmallBox* box, uint32_t blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    barrier_init(&box->arrived, 1);
    barrier_init_fence();
    barrier_expect_bytes(&box->arrived, blocks * sizeof(float4));
  }
  __syncthreads();
  cluster_arrive();
#endif
}
// Sums over the cluster, in the order of the blocks.
__device__ __forceinline__ void exchange(SmallBox* box, uint32_t blocks, uint32_t rank, float (&v)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cluster_wait();
  if (threadIdx.x < blocks) {
    cluster_send(make_float4(v[0], v[1], 0.f, 0.f), box->parts + rank, &box->arrived, threadIdx.x);
  }
  cluster_barrier_wait(&box->arrived, 0);
  v[0] = v[1] = 0.f;
  for (uint32_t r = 0; r < blocks; ++r) {
    v[0] += box->parts[r].x;
    v[1] += box->parts[r].y;
  }
#endif
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kSmallMaxThreads)
    group_norm_small_fwd_kernel(const __grid_constant__ GroupNormSmallFwdParams p) {
  __shared__ float shared[2][kSmallMaxWarps][1];
  const SmallTeam<GroupNormSmallFwdParams> t(p);
  const T* const x = static_cast<const T*>(p.x) + t.base;
  T raw[kElements];
  float v[kElements], weight[kElements], bias[kElements];
  uint32_t offset[kElements], channel[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    raw[k] = from_acc<T>(0.f);
    weight[k] = bias[k] = 0.f;
    if (t.has(k)) {
      offset[k] = t.find(t.element(k), &channel[k]);
      raw[k] = x[offset[k]];
    }
  }
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (t.has(k)) {
      weight[k] = t.template affine<T>(p.weight, channel[k], 1.f);
      bias[k] = t.template affine<T>(p.bias, channel[k], 0.f);
    }
  }
  const float scale = 1.f / static_cast<float>(p.shares.elements);
#pragma unroll
  for (int k = 0; k < kElements; ++k) v[k] = to_acc(raw[k]);
  apply_kind(p.shares.pre_kind, p.pre_act, v);
  float sum[1] = {0.f};
#pragma unroll
  for (int k = 0; k < kElements; ++k) sum[0] += t.has(k) ? v[k] : 0.f;
  t.sum(sum, shared[0]);
  const float mean = sum[0] * scale;
  float squares[1] = {0.f};
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    v[k] -= mean;
    squares[0] += t.has(k) ? v[k] * v[k] : 0.f;
  }
  t.sum(squares, shared[1]);
  const float rstd = rsqrtf(squares[0] * scale + p.eps);
  if (t.active && t.lane == 0) {
    p.mean[t.unit] = mean;
    p.rstd[t.unit] = rstd;
  }
#pragma unroll
  for (int k = 0; k < kElements; ++k) v[k] = v[k] * (rstd * weight[k]) + bias[k];
  apply_kind(p.shares.act_kind, p.act, v);
  T* const y = static_cast<T*>(p.y) + t.base;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (t.has(k)) y[offset[k]] = from_acc<T>(p.add_input ? v[k] + to_acc(raw[k]) : v[k]);
  }
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kSmallMaxThreads)
    group_norm_small_bwd_kernel(const __grid_constant__ GroupNormSmallBwdParams p) {
  extern __shared__ float2 pairs[];  // [teams][chunk] of dz and dz * xhat
  __shared__ float shared[2][kSmallMaxWarps][2];
  __shared__ SmallBox box;
  let_dependents_start();
  const SmallTeam<GroupNormSmallBwdParams> t(p);
  const SmallShares& s = p.shares;
  const uint32_t blocks = 1u << s.blocks_log2;
  const T* const x = static_cast<const T*>(p.x) + t.base;
  const T* const dy = static_cast<const T*>(p.dy) + t.base;
  const float mean = t.active ? p.mean[t.unit] : 0.f, rstd = t.active ? p.rstd[t.unit] : 0.f;
  T raw_x[kElements], raw_dy[kElements];
  float weight[kElements], bias[kElements];
  uint32_t offset[kElements], channel[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    raw_x[k] = raw_dy[k] = from_acc<T>(0.f);
    weight[k] = bias[k] = 0.f;
    if (t.has(k)) {
      offset[k] = t.find(t.element(k), &channel[k]);
      raw_x[k] = x[offset[k]];
      raw_dy[k] = dy[offset[k]];
    }
  }
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (t.has(k)) {
      weight[k] = t.template affine<T>(p.weight, channel[k], 1.f);
      bias[k] = t.template affine<T>(p.bias, channel[k], 0.f);
    }
  }
  if (blocks > 1) open_box(&box, blocks);
  float xhat[kElements], dz[kElements], z[kElements], slope[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = to_acc(raw_x[k]);
    dz[k] = to_acc(raw_dy[k]);
    slope[k] = rstd;
  }
  apply_slope(p.shares.pre_kind, p.pre_act, xhat, slope);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = (xhat[k] - mean) * rstd;
    z[k] = xhat[k] * weight[k] + bias[k];
  }
  apply_slope(p.shares.act_kind, p.act, z, dz);
  float terms[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (!t.has(k)) continue;
    pairs[t.team * s.chunk + t.element(k) - t.first] = make_float2(dz[k], dz[k] * xhat[k]);
    dz[k] *= weight[k];
    terms[0] += dz[k];
    terms[1] += dz[k] * xhat[k];
  }
  t.sum(terms, shared[0]);
  if (s.lanes <= 32) __syncthreads();  // the pairs are there
  if (blocks > 1) exchange(&box, blocks, t.rank, terms);
  const float scale = 1.f / static_cast<float>(s.elements);
  terms[0] *= scale;
  terms[1] *= scale;
  T* const dx = static_cast<T*>(p.dx) + t.base;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (t.has(k)) dx[offset[k]] = from_acc<T>(slope[k] * (dz[k] - (terms[0] + xhat[k] * terms[1])));
  }

  const uint32_t sum_team = s.by_sum_lanes(t.tid), sum_lane = t.tid - sum_team * s.sum_lanes;
  for (uint32_t first = 0; first < s.sums; first += s.sum_teams) {
    const uint32_t m = first + sum_team, team0 = s.by_channels(m), c = m - team0 * s.channels;
    const bool is_mine = sum_team < s.sum_teams && m < s.sums;
    float sums[2] = {0.f, 0.f};
    if (is_mine) {
      uint32_t begin = 0, end = s.terms;
      if (blocks > 1) {  // positions of which this block has the channel
        const auto position_of = [&](uint32_t i) {
          if (s.channels_last) return i > c ? s.by_channels(i - c + s.channels - 1) : 0;
          return i > c * s.by_s.d ? min(i - c * s.by_s.d, s.by_s.d) : 0;
        };
        begin = position_of(t.first);
        end = position_of(t.end);
      }
#pragma unroll 4
      for (uint32_t e = begin + sum_lane; e < end; e += s.sum_lanes) {
        const uint32_t team = s.by_s(e), position = e - team * s.by_s.d;
        const uint32_t i = s.channels_last ? position * s.channels + c : c * s.by_s.d + position;
        const float2 pair = pairs[(team0 + team) * s.chunk + i - t.first];
        sums[0] += pair.x;
        sums[1] += pair.y;
      }
    }
    lanes_sum(s.sum_lanes, sums);
    if (s.sum_lanes > 32) {  // then there is one round
      if (t.tid % 32 == 0) {
        shared[1][t.tid / 32][0] = sums[0];
        shared[1][t.tid / 32][1] = sums[1];
      }
      __syncthreads();
      if (sum_lane == 0 && is_mine) {
        for (uint32_t w = 1; w < s.sum_lanes / 32; ++w) {
          sums[0] += shared[1][t.tid / 32 + w][0];
          sums[1] += shared[1][t.tid / 32 + w][1];
        }
      }
    }
    if (!is_mine || sum_lane != 0) continue;
    if (s.owner) {
      const int64_t at = int64_t(blockIdx.x) * s.channels + c;
      store_as(p.dbias, at, p.gradient_dtype, sums[0]);
      store_as(p.dweight, at, p.gradient_dtype, sums[1]);
    } else {
      const uint32_t unit = (blockIdx.x >> s.blocks_log2) * s.teams + team0;
      if (unit < s.units) {
        const uint32_t n = s.by_groups(unit), part = (n << s.blocks_log2) + t.rank;
        const int64_t at = (int64_t(part) * s.by_groups.d + unit - n * s.by_groups.d) * s.channels + c;
        reinterpret_cast<float2*>(p.channel_sums)[at] = make_float2(sums[0], sums[1]);
      }
    }
  }
}

template <typename T, int kElements>
Status launch_fwd(const GroupNormSmallFwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  return launch_kernel<group_norm_small_fwd_kernel<T, kElements>>("group_norm_small_fwd_kernel", p, dim3(plan.grid),
                                                                  plan.threads, 0, stream);
}
template <typename T, int kElements>
Status launch_bwd(const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  constexpr auto kKernel = group_norm_small_bwd_kernel<T, kElements>;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 1u << p.shares.blocks_log2;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.grid);
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.smem_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = p.shares.blocks_log2 > 0 ? 1 : 0;
  cudaError_t error = allow_dynamic_smem<kKernel>(plan.smem_bytes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kKernel, p);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, "group_norm_small_bwd_kernel", cudaGetErrorString(error)};
  return Status::Ok();
}

#define KGOPT_SMALL_ELEMENTS(launch, T)                            \
  switch (plan.elements) {                                         \
    case 1: return launch<T, 1>(p, plan, stream);                  \
    case 2: return launch<T, 2>(p, plan, stream);                  \
    case 4: return launch<T, 4>(p, plan, stream);                  \
    default: return launch<T, kSmallMaxElements>(p, plan, stream); \
  }
#define KGOPT_SMALL_DISPATCH(name, launch)                             \
  p.shares.pre_kind = chain_kind(p.pre_act);                           \
  p.shares.act_kind = chain_kind(p.act);                               \
  switch (p.dtype) {                                                   \
    case Dtype::kFloat32: KGOPT_SMALL_ELEMENTS(launch, float)          \
    case Dtype::kBFloat16: KGOPT_SMALL_ELEMENTS(launch, __nv_bfloat16) \
    case Dtype::kFloat16: KGOPT_SMALL_ELEMENTS(launch, __half)         \
    default: return Status::Unsupported(name, "float64");              \
  }

}  // namespace

Status run_group_norm_small_fwd(GroupNormSmallFwdParams p, const SmallPlan& plan,
                                cudaStream_t stream){KGOPT_SMALL_DISPATCH("group_norm_small_fwd_kernel", launch_fwd)}

Status run_group_norm_small_bwd(GroupNormSmallBwdParams p, const SmallPlan& plan, cudaStream_t stream) {
  KGOPT_SMALL_DISPATCH("group_norm_small_bwd_kernel", launch_bwd)
}

#undef KGOPT_SMALL_DISPATCH
#undef KGOPT_SMALL_ELEMENTS

}  // namespace kgopt
