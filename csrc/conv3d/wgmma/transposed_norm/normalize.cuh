// Moments of a convolution's tiles, and the norm of a sample while later samples are computed.
//
// A thread keeps the moments of its channels over the tiles of a sample that its block computes. A block that has
// stored its tiles of a sample merges them by groups, leaves them in memory and counts itself in; when all have, any
// warp of any block can normalize pieces of the sample, in place or into another tensor.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "conv3d/wgmma/transposed_norm/params.h"
#include "conv3d/wgmma/transposed_norm/plan.h"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Where the moments of a channel lie.
struct TransposedNormMoments {
  float* base;
  int channels;
  __device__ __forceinline__ Moments<float> load(int parity, int c) const {
    const float* const p = base + parity * 3 * channels + c;
    return {p[0], p[channels], p[2 * channels]};
  }
  __device__ __forceinline__ void store(int parity, int c, const Moments<float>& m) const {
    float* const p = base + parity * 3 * channels + c;
    p[0] = m.mean, p[channels] = m.m2, p[2 * channels] = m.count;
  }
};

// Adds a tile's outputs, as the accumulators hold them, to the moments of this thread's channels, c0 and c0 + 8.
// `count`: positions of the tile that exist, an even number; all of them with kWhole. They are rounded to T first.
template <int kN, bool kWhole, typename T>
__device__ __forceinline__ void add_transposed_norm_moments(const float (&acc)[2][kN / 2], int count,
                                                            const TransposedNormMoments& moments, int parity, int c0) {
  const int t4 = threadIdx.x % 4;
  const auto rounded = [](float v) { return to_acc(from_acc<T>(v)); };
  const float shift[2] = {rounded(acc[0][0]), rounded(acc[0][2])};
  float sum[2] = {}, squares[2] = {};
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) {
    if (!kWhole && j * 8 + t4 * 2 >= count) continue;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float d = rounded(acc[j / (kN / 8)][j % (kN / 8) * 4 + row * 2 + e]) - shift[row];
        sum[row] += d;
        squares[row] += d * d;
      }
    }
  }
  const float mine = kWhole ? float(kN / 2) : float(max(0, count - t4 * 2 + 6) / 8 * 2);
  const float over = mine > 0.f ? __fdividef(1.f, mine) : 0.f;
  float mean[2], deviations[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float offset = sum[row] * over;
    mean[row] = mine > 0.f ? shift[row] + offset : 0.f;
    deviations[row] = mine > 0.f ? squares[row] - sum[row] * offset : 0.f;
  }
  // Of the four threads that have these channels, the first two end with one of them each.
  auto merge_other = [](Moments<float>& m, float mean, float deviations, int lanes) {
    merge(m, Moments<float>{__shfl_xor_sync(0xffffffff, mean, lanes), __shfl_xor_sync(0xffffffff, deviations, lanes),
                            __shfl_xor_sync(0xffffffff, m.count, lanes)});
  };
  const bool odd = t4 % 2 != 0;
  Moments<float> own{odd ? mean[1] : mean[0], odd ? deviations[1] : deviations[0], mine};
  merge_other(own, odd ? mean[0] : mean[1], odd ? deviations[0] : deviations[1], 1);
  merge_other(own, own.mean, own.m2, 2);
  if (t4 >= 2) return;
  const int c = c0 + t4 * 8;
  Moments<float> all = moments.load(parity, c);
  merge(all, own);
  moments.store(parity, c, all);
}

// By one warp: this block's share of a sample's moments, by groups, for all blocks to read.
__device__ __forceinline__ void publish_transposed_norm_moments(const TransposedNormParams& p,
                                                                const TransposedNormMoments& moments, int sample) {
  const int lane = threadIdx.x % 32, parity = sample % 2;
  const int channels = p.c_out / p.groups;
  for (int group = lane; group < p.groups; group += 32) {
    Moments<float> m;
    for (int c = group * channels; c < (group + 1) * channels; ++c) {
      const Moments<float> other = moments.load(parity, c);
      merge(m, other);
    }
    reinterpret_cast<float4*>(p.partials)[(int64_t(sample) * p.groups + group) * gridDim.x + blockIdx.x] =
        make_float4(m.mean, m.m2, m.count, 0.f);
  }
}

// A block's share of a sample, in 16-byte vectors.
struct TransposedNormShare {
  int first, end;
};
__device__ __forceinline__ TransposedNormShare transposed_norm_share(int vectors) {
  const int unit = kTransposedNormPieceBytes / 16, pieces = (vectors + unit - 1) / unit;
  const int first = int64_t(pieces) * blockIdx.x / gridDim.x, end = int64_t(pieces) * (blockIdx.x + 1) / gridDim.x;
  return {min(first * unit, vectors), min(end * unit, vectors)};
}

// By `warps` warps, of which this is number `warp`: mean, scale and offset of each channel that the share touches, once
// all blocks have arrived.
__device__ __forceinline__ void make_norm_table(const TransposedNormParams& p, int sample,
                                                const TransposedNormShare& share, float4* table, int warp, int warps) {
  if (share.first >= share.end) return;
  const int lane = threadIdx.x % 32, channels = p.c_out / p.groups, blocks = gridDim.x;
  const int last_group = p.plan.by_channel(share.end - 1) / channels;
  for (int group = p.plan.by_channel(share.first) / channels + warp; group <= last_group; group += warps) {
    const int64_t index = int64_t(sample) * p.groups + group;
    auto affine = [&](int c) {
      return make_float2(p.gamma ? load_as<float>(p.gamma, c, p.affine_dtype) : 1.f,
                         p.beta ? load_as<float>(p.beta, c, p.affine_dtype) : 0.f);
    };
    float2 own = lane < channels ? affine(group * channels + lane) : float2();  // there before the moments are
    const float4* const from = reinterpret_cast<const float4*>(p.partials) + index * blocks;
    Moments<float> m;
    constexpr int kAtOnce = 5;
    for (int i0 = lane; i0 < blocks; i0 += kAtOnce * 32) {
      float4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        v[i] = i0 + i * 32 < blocks ? __ldcg(from + i0 + i * 32) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) merge(m, Moments<float>{v[i].x, v[i].y, v[i].z});
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      merge(m, Moments<float>{__shfl_xor_sync(0xffffffff, m.mean, lanes), __shfl_xor_sync(0xffffffff, m.m2, lanes),
                              __shfl_xor_sync(0xffffffff, m.count, lanes)});
    }
    const float mean = __shfl_sync(0xffffffff, m.mean, 0);
    const float rstd = rsqrtf(__shfl_sync(0xffffffff, m.m2, 0) / __shfl_sync(0xffffffff, m.count, 0) + p.eps);
    const int64_t first = int64_t(group) * channels * p.plan.channel_vectors;  // of the group
    if (lane == 0 && p.mean && first >= share.first && first < share.end) p.mean[index] = mean, p.rstd[index] = rstd;
    for (int c = lane; c < channels; c += 32) {
      if (c > lane) own = affine(group * channels + c);
      table[group * channels + c] = make_float4(mean, own.x * rstd, own.y, 0.f);
    }
  }
}

template <typename Element>
__device__ __forceinline__ uint4 normalize_vector(uint4 v, const float4& t) {
  constexpr int kVec = 16 / sizeof(Element);
  const Vec<Element, kVec>& in = reinterpret_cast<const Vec<Element, kVec>&>(v);
  float x[kVec];
  unpack(in, x);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    // Half types' own rounding is far above that of an offset.
    x[i] = sizeof(Element) == 2 ? fmaf(x[i], t.y, fmaf(-t.x, t.y, t.z)) : (x[i] - t.x) * t.y + t.z;
  }
  const Vec<Element, kVec> out = pack<Element, kVec>(x);
  return reinterpret_cast<const uint4&>(out);
}

// The next sample for the helpers, which take the first ones, or for the computing warps, which take the last; -1:
// none. `claim` holds both ends of what is left.
__device__ __forceinline__ int claim_transposed_norm_sample(uint32_t* claim, bool from_first) {
  while (true) {
    const uint32_t left = *reinterpret_cast<volatile uint32_t*>(claim);
    const int first = left & 0xffff, end = (left >> 16) + 1;  // n - 1 fits
    if (first >= end) return -1;
    if (!from_first && end == 1) {
      if (atomicCAS(claim, left, 1u) == left) return 0;
      continue;
    }
    if (atomicCAS(claim, left, from_first ? left + 1 : left - 0x10000) == left) return from_first ? first : end - 1;
  }
}

__device__ __forceinline__ void await_all_blocks(const TransposedNormParams& p, int sample) {
  while (load_relaxed(p.arrived + sample) != gridDim.x) __nanosleep(100);
  load_acquire(p.arrived + sample);  // once: it takes what the multiprocessor's L1 holds
}

#endif

}  // namespace kgopt
