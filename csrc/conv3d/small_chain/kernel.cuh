// Convolution, GroupNorm and what follows for small samples in one launch, sm_90: what such a chain takes is the chain
// of waits of its launches, so there is one, in which everything is waited for once. A cluster has a sample. Its blocks
// load their parts of x, with halos, and all weights, multiply by mma.sync in TF32 (which holds half types exactly), a
// gather by offsets as in conv3d/few_channels/gather/kernel.cuh, and leave the outputs in shared memory as fp32. There
// they are summed up channel by channel; blocks send each other their channels' moments, and each of them merges all of
// them in the same order and goes on with its own outputs. Few samples that are larger have teams of blocks all over
// the GPU, which tell each other through memory, instead of clusters.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/reduce.cuh"
#include "conv3d/few_channels/finish.cuh"
#include "conv3d/small_chain/plan.h"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// n / d for n and d below 2^20, by 1 / d.
__device__ __forceinline__ int small_quotient(int n, float inverse) {
  return static_cast<int>((static_cast<float>(n) + 0.5f) * inverse);
}

// What the products read: rounded for TF32, which cuts off the last bits, infinities and NaNs as they are. Three
// instructions, which ptxas leaves behind all loads. fp32 accuracy splits what it loads.
template <bool kExact>
__device__ __forceinline__ uint32_t chain_word(float v) {
  const uint32_t bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu;
  if (kExact) return bits;
  return static_cast<uint32_t>(__viaddmax_s32(magnitude, 0x1000, magnitude)) | (bits & 0x80000000u);
}

// Where a block's part of a sample begins and ends, along depth and height of the output.
struct ChainPart {
  int begin[2], size[2];
  int positions;

  __device__ __forceinline__ ChainPart(const ChainParams& p, int rank) {
    const ChainPlan& plan = p.plan;
    const int depth = plan.by_split[1](rank), at[2] = {depth, rank - depth * plan.split[1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      begin[i] = plan.by_split[i](p.out[i] * at[i]);
      size[i] = plan.by_split[i](p.out[i] * (at[i] + 1)) - begin[i];
    }
    positions = size[0] * size[1] * p.out[2];
  }
};

// A value of x's or the norm's type as it lies in memory. Nothing waits for it before it is asked for as a number.
template <typename T>
__device__ __forceinline__ T load_raw(const T* p, bool wanted) {
  T v = T();
  if (wanted) v = *p;
  return v;
}

// What a round of loads brings: each value and where it goes, which is below 0 where there is none.
template <typename T, int kCount>
struct ChainRound {
  T value[kCount];
  int at[kCount];

  template <bool kExact>
  __device__ __forceinline__ void put(uint32_t* to) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (at[u] >= 0) to[at[u]] = chain_word<kExact>(to_acc(value[u]));
    }
  }
};

// A channel's parameters as they lie: nothing waits for them before they are asked for as numbers.
template <typename T>
struct ChainChannel {
  T bias;
  float wide[2];  // weight and bias of the norm, in fp32 or
  unsigned short half[2];

  __device__ __forceinline__ void load(const ChainParams& p, int c) {
    const bool is_wide = p.affine_dtype == Dtype::kFloat32;
    bias = load_raw(static_cast<const T*>(p.bias) + c, p.bias);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const void* const from = i == 0 ? p.norm_weight : p.norm_bias;
      wide[i] = load_raw(static_cast<const float*>(from) + c, from && is_wide);
      half[i] = load_raw(static_cast<const unsigned short*>(from) + c, from && !is_wide);
    }
  }
  __device__ __forceinline__ float norm(const ChainParams& p, int i) const {
    if (!(i == 0 ? p.norm_weight : p.norm_bias)) return i == 0 ? 1.f : 0.f;
    return p.affine_dtype == Dtype::kFloat32   ? wide[i]
           : p.affine_dtype == Dtype::kFloat16 ? __half2float(__ushort_as_half(half[i]))
                                               : __uint_as_float(uint32_t(half[i]) << 16);
  }
};

// All that the products read into shared memory: the halo, with zeros outside of x, and the weights in the order of
// fragments. What is at work here is read from memory for the first time, instructions as well, so loops are short and
// not unrolled beyond the loads that are on their way together.
template <typename T, bool kExact>
__device__ __forceinline__ void chain_load(const ChainParams& p, const ChainPart& part, int64_t n,
                                           const ChainSmemLayout& layout, uint32_t* smem) {
  const ChainPlan& plan = p.plan;
  int* const offsets = reinterpret_cast<int*>(smem + layout.offsets);
  int* const sources = reinterpret_cast<int*>(smem + layout.sources);
  int2* const row_table = reinterpret_cast<int2*>(smem + layout.rows);
  uint32_t* const weights = smem + layout.weights;
  uint32_t* const halo = smem + layout.halo;
  float* const biases = reinterpret_cast<float*>(smem + layout.bias);
  float2* const affine = reinterpret_cast<float2*>(smem + layout.affine);
  const int tid = threadIdx.x, threads = blockDim.x;
  const int rows = p.c_in * p.groups * plan.halo[0] * plan.halo[1], channels = p.c_out * p.groups;
  // What is read at the end is on its way into L2 from the start.
  if (tid < channels) {
    const int affine_size = p.affine_dtype == Dtype::kFloat32 ? 4 : 2;
    if (p.bias) prefetch_l2(static_cast<const T*>(p.bias) + tid);
    if (p.norm_weight) prefetch_l2(static_cast<const char*>(p.norm_weight) + tid * affine_size);
    if (p.norm_bias) prefetch_l2(static_cast<const char*>(p.norm_bias) + tid * affine_size);
  }
  // Row of the halo, all channels' rows counted through -> its place, ~ if it lies outside of x, and its offset in x.
#pragma unroll 1
  for (int row = tid; row < rows; row += threads) {
    const int plane = plan.by_height(row), c = plan.by_depth(plane);
    const int h = row - plane * plan.halo[1], d = plane - c * plan.halo[0];
    const int at = c * plan.plane + (d * plan.halo[1] + h) * plan.halo[2];
    const int in_d = part.begin[0] * p.step[0] - p.padding[0] + d, in_h = part.begin[1] * p.step[1] - p.padding[1] + h;
    const bool inside = static_cast<unsigned>(in_d) < static_cast<unsigned>(p.in[0]) &&
                        static_cast<unsigned>(in_h) < static_cast<unsigned>(p.in[1]);
    const int offset = c * static_cast<int>(p.x_stride_c) + in_d * static_cast<int>(p.x_stride[0]) +
                       in_h * static_cast<int>(p.x_stride[1]) - p.padding[2] * static_cast<int>(p.x_stride[2]);
    row_table[row] = make_int2(inside ? at : ~at, offset);
  }
  // K entry -> where it lies in the halo, and its weights. Padding has weights of zero and reads the first entry: what
  // is not finite there makes the statistics NaN anyway.
#pragma unroll 1
  for (int k = tid; k < plan.k_steps * 8; k += threads) {
    int at = 0, source = 0;
    if (k < plan.k) {
      const int row = plan.by_kernel[2](k), w = k - row * p.kernel[2];
      const int plane = plan.by_kernel[1](row), h = row - plane * p.kernel[1];
      const int c = plan.by_kernel[0](plane), d = plane - c * p.kernel[0];
      at = c * plan.plane + (d * p.dilation[0] * plan.halo[1] + h * p.dilation[1]) * plan.halo[2] + w * p.dilation[2];
      source = c * static_cast<int>(p.w_stride_in) + d * static_cast<int>(p.w_stride_k[0]) +
               h * static_cast<int>(p.w_stride_k[1]) + w * static_cast<int>(p.w_stride_k[2]);
    }
    offsets[((k >> 3) * 4 + (k & 3)) * 2 + (k >> 2 & 1)] = at;
    sources[k] = source;
  }
  __syncthreads();

  const T* const x = static_cast<const T*>(p.x) + n * p.x_stride_n;
  const T* const weight = static_cast<const T*>(p.weight);
  const int lane = tid & ((1 << plan.row_lanes_log2) - 1), items = rows * plan.pieces;
  const int groups = threads >> plan.row_lanes_log2, stride_w = static_cast<int>(p.x_stride[2]);
  const int padded_k = plan.k_steps * 8, rows_of_weights = plan.n_tiles * 8;
  const int weight_items = rows_of_weights * p.groups * padded_k;
  int base = tid >> plan.row_lanes_log2, weight_base = tid;
#pragma unroll 1
  for (int round = 0; round < plan.load_rounds; ++round) {
    ChainRound<T, kChainLoads> values;
    ChainRound<T, kChainWeights> some;
#pragma unroll
    for (int u = 0; u < kChainLoads; ++u, base += groups) {
      const int row = plan.by_pieces(base), w = ((base - row * plan.pieces) << plan.row_lanes_log2) + lane;
      const bool is_there = base < items && w < plan.halo[2];
      const int2 place = row_table[min(row, rows - 1)];
      values.at[u] = is_there ? (place.x ^ place.x >> 31) + w : -1;
      const bool inside = place.x >= 0 && static_cast<unsigned>(w - p.padding[2]) < static_cast<unsigned>(p.in[2]);
      values.value[u] = load_raw(x + (place.y + w * stride_w), is_there && inside);
    }
#pragma unroll
    for (int u = 0; u < kChainWeights; ++u, weight_base += threads) {
      const int row = plan.by_padded_k(weight_base), k = weight_base - row * padded_k;
      const int group = plan.by_weight_rows(row), c = row - group * rows_of_weights;
      const bool is_there = weight_base < weight_items, wanted = is_there && k < plan.k && c < p.c_out;
      // A fragment's two are four entries of K apart.
      const int at = (((row >> 3) * plan.k_steps + (k >> 3)) * 32 + (row & 7) * 4 + (k & 3)) * 2 + (k >> 2 & 1);
      some.at[u] = is_there ? at : -1;
      const int source = group * static_cast<int>(p.w_stride_group) + c * static_cast<int>(p.w_stride_out);
      some.value[u] = load_raw(weight + (source + sources[k]), wanted);
    }
    __syncwarp();  // else what is done to the first values, for which it waits, is moved ahead of the last loads
    values.template put<kExact>(halo);
    some.template put<kExact>(weights);
  }
#pragma unroll 1
  for (int c = tid; c < channels; c += threads) {
    ChainChannel<T> own;
    own.load(p, c);
    affine[c] = make_float2(own.norm(p, 0), own.norm(p, 1));
    biases[c] = p.bias ? to_acc(own.bias) : 0.f;
  }
}

// Outputs of `count` positions of the part from `first` on.
template <int kBatch, bool kExact>
__device__ __forceinline__ void chain_multiply(const ChainParams& p, const ChainPart& part, int first, int count,
                                               const int2* offsets, const uint32_t* weights, const float* biases,
                                               const uint32_t* halo, float* outputs) {
  const ChainPlan& plan = p.plan;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int m_tiles = (count + 15) >> 4, batches = (plan.n_tiles + kBatch - 1) / kBatch;
  const int items = m_tiles * batches * p.groups;
  const float by_m_tiles = __fdividef(1.f, static_cast<float>(m_tiles));
  const float by_height = __fdividef(1.f, static_cast<float>(part.size[1]));
  const int2* const own_offsets = offsets + t;
#pragma unroll 1
  for (int item = warp; item < items; item += warps) {
    const int columns = small_quotient(item, by_m_tiles), tile = item - columns * m_tiles;
    const int group = p.groups == 1 ? 0 : plan.by_batches(columns), n_tile = (columns - group * batches) * kBatch;
    const uint32_t* from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = min(first + tile * 16 + g + i * 8, part.positions - 1);
      const int row = plan.by_out_width(position), w = position - row * p.out[2];
      const int d = part.size[0] == 1 ? 0 : small_quotient(row, by_height), h = row - d * part.size[1];
      from[i] = halo + group * p.c_in * plan.plane + (d * p.step[0] * plan.halo[1] + h * p.step[1]) * plan.halo[2] +
                w * p.step[2];
    }
    const uint2* b[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {  // the last tile again where there are fewer
      const int at = group * plan.n_tiles + min(n_tile + j, plan.n_tiles - 1);
      b[j] = reinterpret_cast<const uint2*>(weights) + at * plan.k_steps * 32 + lane;
    }
    float acc[kBatch][4] = {};
#pragma unroll(kExact ? 1 : 4)
    for (int step = 0; step < plan.k_steps; ++step) {
      const int2 offset = own_offsets[step * 4];
      uint32_t a[4] = {from[0][offset.x], from[1][offset.x], from[0][offset.y], from[1][offset.y]};
      if constexpr (kExact) {
        // The tensor core cuts off where it adds: a step has a sum of its own, which begins with the small products.
        uint32_t low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) split_tf32_for_stats(__uint_as_float(a[i]), &a[i], &low[i]);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const uint2 word = b[j][step * 32];
          uint32_t high_b[2], low_b[2];
          split_tf32_for_stats(__uint_as_float(word.x), &high_b[0], &low_b[0]);
          split_tf32_for_stats(__uint_as_float(word.y), &high_b[1], &low_b[1]);
          float sum[4] = {};
          mma_tf32(sum, low, high_b[0], high_b[1]);
          mma_tf32(sum, a, low_b[0], low_b[1]);
          mma_tf32(sum, a, high_b[0], high_b[1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[j][i] += sum[i];
        }
      } else {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const uint2 word = b[j][step * 32];
          mma_tf32(acc[j], a, word.x, word.y);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (n_tile + j >= plan.n_tiles) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = (n_tile + j) * 8 + t * 2 + (i & 1), position = tile * 16 + g + (i >> 1) * 8;
        if (c >= p.c_out || position >= count) continue;
        outputs[(group * p.c_out + c) * plan.chunk_pitch + position] = acc[j][i] + biases[group * p.c_out + c];
      }
    }
  }
}

// Moments of `count` positions of all channels, added to what `parts` has from earlier chunks.
__device__ __forceinline__ void chain_sum_up(const ChainPlan& plan, int channels, int count, bool is_first,
                                             const float* outputs, Moments<float>* parts) {
  const int lanes = 1 << plan.stat_lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int units = channels * plan.stat_parts, at_once = blockDim.x >> plan.stat_lanes_log2;
  const int length = (count + plan.stat_parts - 1) >> plan.stat_parts_log2;
#pragma unroll 1
  for (int base = 0; base < units; base += at_once) {
    const int unit = base + (threadIdx.x >> plan.stat_lanes_log2);
    const int c = unit >> plan.stat_parts_log2, begin = (unit - c * plan.stat_parts) * length;
    const int end = unit < units ? min(begin + length, count) : 0;
    const float* const from = outputs + c * plan.chunk_pitch;
    ShiftedSums<float> sums;
    if (begin < end) sums.shift = from[begin];
#pragma unroll 4
    for (int i = begin + lane; i < end; i += lanes) sums.add(from[i]);
#pragma unroll 1
    for (int mask = 1; mask < lanes; mask *= 2) {
      sums.sum += __shfl_xor_sync(0xffffffffu, sums.sum, mask);
      sums.sum_sq += __shfl_xor_sync(0xffffffffu, sums.sum_sq, mask);
    }
    if (lane == 0 && unit < units) {
      Moments<float> m = sums.moments(static_cast<float>(max(end - begin, 0)));
      if (!is_first) {
        Moments<float> all = parts[unit];
        merge(all, m);
        m = all;
      }
      parts[unit] = m;
    }
  }
}

// logsumexp over channels of u + hardswish(tanh(scale u + shift)) for `count` positions. `columns` has scale and shift
// of each channel, times 2 log2(e).
__device__ __forceinline__ void chain_reduce_channels(const ChainParams& p, int channels, int count,
                                                      const float2* columns, float* outputs, int64_t y_at) {
  constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
  const ChainPlan& plan = p.plan;
  const int lanes = 1 << plan.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int at_once = blockDim.x >> plan.lanes_log2;
#pragma unroll 1
  for (int base = 0; base < count; base += at_once) {
    const int position = base + (threadIdx.x >> plan.lanes_log2);
    float* const from = outputs + position;
    const bool is_there = position < count;
    const int end = is_there ? channels : 0;
    float most = -INFINITY;
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int first = lane; first < end; first += kAtOnce * lanes) {
      float u[kAtOnce], r[kAtOnce];
      float2 column[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int next = first + i * lanes, c = next < end ? next : first;
        u[i] = from[c * plan.chunk_pitch];
        column[i] = columns[c];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // With q = 1 / (1 + exp(2 z)) tanh(z) is 1 - 2 q; since |tanh| <= 1, hardswish needs no clamp.
        float e, q;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fmaf(u[i], column[i].x, column[i].y)));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(1.f + e));
        const float h = fmaf(-2.f, q, 1.f);
        r[i] = fmaf(h, fmaf(h, 1.f / 6.f, 0.5f), u[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int c = first + i * lanes;
        if (c >= end) continue;
        from[c * plan.chunk_pitch] = r[i];
        most = fmaxf(most, r[i]);
      }
    }
#pragma unroll 1
    for (int mask = 1; mask < lanes; mask *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
    // As torch.logsumexp: an infinite maximum comes out as it is.
    const float shift = fabsf(most) == INFINITY ? 0.f : most;
    float sum = 0.f;
#pragma unroll 4
    for (int c = lane; c < end; c += lanes) {
      float e;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"((from[c * plan.chunk_pitch] - shift) * kLog2E));
      sum += e;
    }
#pragma unroll 1
    for (int mask = 1; mask < lanes; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (is_there && lane == 0) store_as(p.y, y_at + position, p.y_dtype, fmaf(log2f(sum), kLn2, shift));
  }
}

#endif

template <int kBatch, bool kExact>
__global__ void __launch_bounds__(kChainMaxThreads, 1) conv_chain_kernel(const __grid_constant__ ChainParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) uint32_t smem[];
  const ChainPlan& plan = p.plan;
  const ChainSmemLayout layout = chain_smem_layout(plan, p.c_in, p.c_out, p.groups, p.num_groups);
  const uint32_t* const weights = smem + layout.weights;
  float* const biases = reinterpret_cast<float*>(smem + layout.bias);
  float2* const affine = reinterpret_cast<float2*>(smem + layout.affine);
  float2* const columns = reinterpret_cast<float2*>(smem + layout.columns);
  float2* const groups = reinterpret_cast<float2*>(smem + layout.groups);
  Moments<float>* const parts = reinterpret_cast<Moments<float>*>(smem + layout.parts);
  float4* const moments = reinterpret_cast<float4*>(smem + layout.moments);
  float* const outputs = reinterpret_cast<float*>(smem + layout.outputs);
  const uint32_t* const halo = smem + layout.halo;

  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31;
  const int blocks = plan.blocks, sample = plan.by_blocks(blockIdx.x);
  const int rank = static_cast<int>(blockIdx.x) - sample * blocks;
  const int64_t n = sample;
  const int channels = p.c_out * p.groups;
  const ChainPart part(p, rank);
  const bool is_cluster = !plan.is_team && blocks > 1;
  if (is_cluster) cluster_arrive();  // whoever sends to this block knows that it has begun

  switch (p.dtype) {
    case Dtype::kBFloat16: chain_load<__nv_bfloat16, kExact>(p, part, n, layout, smem); break;
    case Dtype::kFloat16: chain_load<__half, kExact>(p, part, n, layout, smem); break;
    default: chain_load<float, kExact>(p, part, n, layout, smem);
  }
  __syncthreads();

  const int2* const pairs = reinterpret_cast<const int2*>(smem + layout.offsets);
#pragma unroll 1
  for (int chunk = 0; chunk < plan.chunks; ++chunk) {
    const int first = chunk * plan.chunk, count = min(plan.chunk, part.positions - first);
    if (chunk > 0) __syncthreads();  // the last one's outputs were summed up
    if (count > 0) chain_multiply<kBatch, kExact>(p, part, first, count, pairs, weights, biases, halo, outputs);
    __syncthreads();
    chain_sum_up(plan, channels, max(count, 0), chunk == 0, outputs, parts);
  }
  __syncthreads();
  const auto merged = [&](int c) {
    Moments<float> m = parts[c * plan.stat_parts];
#pragma unroll 1
    for (int k = 1; k < plan.stat_parts; ++k) merge(m, parts[c * plan.stat_parts + k]);
    return make_float4(m.mean, m.m2, m.count, 0.f);
  };
  // Channels of the sample: means relative to the first block's, so that an offset is rounded once.
  const float positions = static_cast<float>(p.out[0]) * p.out[1] * p.out[2];
  if (plan.is_team) {
    float4* const shares = static_cast<float4*>(p.moments) + n * blocks * channels;
    for (int c = tid; c < channels; c += threads) shares[rank * channels + c] = merged(c);
    __syncthreads();
    if (tid == 0) {
      add_release(p.arrived + n, 1);
      while (load_acquire(p.arrived + n) < static_cast<uint32_t>(blocks)) __nanosleep(20);
    }
    __syncthreads();
    constexpr int kOwn = 9;  // entries of a lane that are on their way together
    const int lanes = 1 << plan.team_lanes_log2, own_lane = tid & (lanes - 1);
#pragma unroll 1
    for (int base = 0; base < channels; base += threads >> plan.team_lanes_log2) {
      const int c = base + (tid >> plan.team_lanes_log2), end = c < channels ? blocks : 0;
      const float origin = end > 0 ? __ldcg(&shares[c].x) : 0.f;
      float sum = 0.f, m2 = 0.f;
#pragma unroll 1
      for (int first = own_lane; first < end; first += lanes * kOwn) {
        float4 m[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const int b = first + i * lanes;
          m[i] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (b < end) m[i] = __ldcg(shares + b * channels + c);
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float d = m[i].x - origin;
          if (m[i].z > 0.f) {
            sum = fmaf(m[i].z, d, sum);
            m2 += fmaf(m[i].z, d * d, m[i].y);
          }
        }
      }
#pragma unroll 1
      for (int mask = 1; mask < lanes; mask *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        m2 += __shfl_xor_sync(0xffffffffu, m2, mask);
      }
      const float offset = quotient(sum, positions);
      // A NaN stays one.
      m2 -= positions * offset * offset;
      if (end > 0 && own_lane == 0) moments[c] = make_float4(origin + offset, m2 < 0.f ? 0.f : m2, 0.f, 0.f);
    }
  } else if (!is_cluster) {  // moments are the block's own
#pragma unroll 1
    for (int c = tid; c < channels; c += threads) moments[c] = merged(c);
  } else {
    cluster_wait();  // the others have begun
#pragma unroll 1
    for (int i = tid; i < channels * blocks; i += threads) {
      const int to = plan.by_channels(i), c = i - to * channels;
      cluster_store(merged(c), moments + rank * channels + c, to);
    }
    cluster_arrive_release();
    cluster_wait();
#pragma unroll 1
    for (int c = tid; c < channels; c += threads) {  // they take the first block's place
      const float origin = moments[c].x;
      float sum = 0.f, m2 = 0.f;
      for (int b = 0; b < blocks; ++b) sum += moments[b * channels + c].z * (moments[b * channels + c].x - origin);
      const float mean = origin + quotient(sum, positions);
      for (int b = 0; b < blocks; ++b) {
        const float4 m = moments[b * channels + c];
        const float d = m.x - mean;
        m2 += fmaf(m.z, d * d, m.y);
      }
      moments[c] = make_float4(mean, m2, 0.f, 0.f);
    }
  }
  __syncthreads();
  if (rank == 0 && p.channel_mean) {
#pragma unroll 1
    for (int c = tid; c < channels; c += threads) p.channel_mean[n * channels + c] = moments[c].x;
  }
  const int size = channels / p.num_groups;
#pragma unroll 1
  for (int g = tid >> 5; g < p.num_groups; g += threads >> 5) {
    const float4* const from = moments + g * size;
    const float origin = from[0].x;
    float sum = 0.f, m2 = 0.f;
#pragma unroll 1
    for (int c = lane; c < size; c += 32) sum += from[c].x - origin;
    const float mean = origin + quotient(warp_sum(sum), static_cast<float>(size));
#pragma unroll 1
    for (int c = lane; c < size; c += 32) {
      const float d = from[c].x - mean;
      m2 += fmaf(positions, d * d, from[c].y);
    }
    const float rstd = reciprocal_root(quotient(warp_sum(m2), positions * static_cast<float>(size)) + p.eps);
    if (lane == 0) {
      groups[g] = make_float2(mean, rstd);
      if (rank == 0 && p.mean) p.mean[n * p.num_groups + g] = mean;
      if (rank == 0 && p.rstd) p.rstd[n * p.num_groups + g] = rstd;
    }
  }
  __syncthreads();
  if (!p.lse) {
    if (rank != 0 || tid >= 32) return;
    float sum = 0.f;
#pragma unroll 1
    for (int c = lane; c < channels; c += 32) {
      const float2 statistics = groups[plan.by_group(c)];
      sum += fmaf((moments[c].x - statistics.x) * statistics.y, affine[c].x, affine[c].y);
    }
    sum = warp_sum(sum);
    if (lane == 0) store_as(p.y, n, p.y_dtype, quotient(sum, static_cast<float>(channels)));
    return;
  }
#pragma unroll 1
  for (int c = tid; c < channels; c += threads) {
    constexpr float kTwice = 2.f * 1.44269504088896340736f;
    const float2 statistics = groups[plan.by_group(c)];
    const float scale = statistics.y * affine[c].x;
    columns[c] = make_float2(scale * kTwice, fmaf(-statistics.x, scale, affine[c].y) * kTwice);
  }
  const int64_t y_first = n * p.out[1] * p.out[2] + int64_t(part.begin[1]) * p.out[2];
#pragma unroll 1
  for (int chunk = 0; chunk < plan.chunks; ++chunk) {
    const int first = chunk * plan.chunk, count = min(plan.chunk, part.positions - first);
    if (plan.chunks > 1) {
      __syncthreads();  // nobody needs what was there
      if (count > 0) chain_multiply<kBatch, kExact>(p, part, first, count, pairs, weights, biases, halo, outputs);
    }
    __syncthreads();
    if (count > 0) chain_reduce_channels(p, channels, count, columns, outputs, y_first + first);
  }
#endif
}

}  // namespace kgopt
