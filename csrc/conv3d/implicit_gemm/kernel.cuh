// Implicit GEMM on mma.sync for convolutions of few channels, sm_80 and later.
//
// Rows of the GEMM are output positions of a box-shaped tile, columns output channels, K the input channels and taps.
// The tile's input halo lies in shared memory as one plane per channel word, exactly as the input lies: element A[m][k]
// is halo[row_base(m) + offset(k)], so every tap, stride, dilation and transposed class is only another offset table,
// and nothing is ever unfolded. Weights come packed in fragment order (conv3d/implicit_gemm/pack.cu). A block walks
// over several tiles of one sample with two stages: while the tensor cores work on one, cp.async fills the other. The
// epilogue sees the fp32 accumulators in registers and stores them, reduces them to statistics, or carries them to
// logsumexp.
#pragma once

#include <cuda_runtime.h>

#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/reduce.cuh"
#include "conv3d/implicit_gemm/params.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

template <ConvMath kMath>
struct ConvMathTraits {
  using Element = float;
  static constexpr int kPerWord = 1;
  static constexpr int kSplit = kMath == ConvMath::kTf32x3 ? 2 : 1;
};
template <>
struct ConvMathTraits<ConvMath::kBf16> {
  using Element = __nv_bfloat16;
  static constexpr int kPerWord = 2;
  static constexpr int kSplit = 1;
};
template <>
struct ConvMathTraits<ConvMath::kFp16> {
  using Element = __half;
  static constexpr int kPerWord = 2;
  static constexpr int kSplit = 1;
};
template <>
struct ConvMathTraits<ConvMath::kFp16x1> {
  using Element = float;
  static constexpr int kPerWord = 2;
  static constexpr int kSplit = 1;
};
template <>
struct ConvMathTraits<ConvMath::kFp16x3> {
  using Element = float;
  static constexpr int kPerWord = 2;
  static constexpr int kSplit = 2;
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Largest relative error 2^-11, as fine as the products that it follows in TF32 and half arithmetic.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A walk over the tiles of a sample without divisions.
struct TileCursor {
  int d, h, w;
  __device__ void advance(int tiles_h, int tiles_w) {
    if (++w == tiles_w) {
      w = 0;
      if (++h == tiles_h) {
        h = 0;
        ++d;
      }
    }
  }
};

// A regular convolution is a transposed one of a single class, whose outputs are one apart. Epilogues that store
// nothing have no transposed ones.
template <ConvMath kMath, int kMB, int kNB, ConvEpilogue kEpilogue>
__global__ void __launch_bounds__(kConvThreads, conv_blocks_per_sm(kMath, kNB))
    conv_fprop_kernel(const __grid_constant__ ImplicitGemmParams p) {
  using Traits = ConvMathTraits<kMath>;
  using Element = typename Traits::Element;
  constexpr int kSplit = Traits::kSplit;
  constexpr int kPerWord = Traits::kPerWord;
  constexpr bool kStats = kEpilogue == ConvEpilogue::kStoreStats;
  constexpr bool kStore = kEpilogue == ConvEpilogue::kStore || kStats;
  static_assert(kEpilogue != ConvEpilogue::kStats, "kStoreStats without y");
  constexpr bool kLse = kEpilogue == ConvEpilogue::kResidualLse;
  constexpr int kColumns = kNB * 8;
  constexpr float kLog2E = 1.44269504088896340736f;
  constexpr bool kAccurateTanh = kMath == ConvMath::kTf32x3;

  extern __shared__ uint32_t smem[];
  const ImplicitGemmPlan& plan = p.plan;
  const ImplicitGemmSmemLayout layout = implicit_gemm_smem_layout(plan);
  int2* const offsets = reinterpret_cast<int2*>(smem + layout.offsets);
  int2* const halo_map = reinterpret_cast<int2*>(smem + layout.halo_map);
  uint32_t* const weights = smem + layout.weights;
  float* const scratch = reinterpret_cast<float*>(smem + layout.epilogue);
  uint32_t* const halo = smem + layout.halo;
  const int halo_lo = (plan.words + plan.zero_plane) * plan.plane;  // low parts of 3xTF32 start here
  const int halo_stage = halo_lo * kSplit;
  const int weight_stage = plan.chunks > 1 ? plan.k_steps_max * kNB * 64 * kSplit : 0;

  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int warp = tid >> 5;
  const int g = lane >> 2;
  const int t = lane & 3;

  const int64_t n = blockIdx.x / plan.slices;
  const int64_t slice = blockIdx.x % plan.slices;
  const int n_tile = blockIdx.y;
  const int group = blockIdx.z % p.groups;
  const int cls = kStore ? blockIdx.z / p.groups : 0;
  const int residue_w = kStore ? cls % plan.classes[2] : 0;
  const int residue_h = kStore ? cls / plan.classes[2] % plan.classes[1] : 0;
  const int residue_d = kStore ? cls / (plan.classes[2] * plan.classes[1]) : 0;
  const int out_step_d = kStore ? plan.out_step[0] : 1;
  const int out_step_h = kStore ? plan.out_step[1] : 1;
  const int out_step_w = kStore ? plan.out_step[2] : 1;
  const ConvDimClass dim_d = plan.dim[0][residue_d];
  const ConvDimClass dim_h = plan.dim[1][residue_h];
  const ConvDimClass dim_w = plan.dim[2][residue_w];
  const int taps = dim_d.taps * dim_h.taps * dim_w.taps;
  const int k_words = taps * plan.words;
  const int k_steps = (k_words + 7) / 8;
  const int halo_positions = plan.halo[0] * plan.halo[1] * plan.pitch;

  // K entry -> byte offset in the halo. Padded entries point at the plane of zeros: a zero weight alone would turn an
  // infinite input into a NaN.
  for (int i = tid; i < k_steps * 8; i += kConvThreads) {
    int offset = plan.words * plan.plane;
    if (i < k_words) {
      const int word = plan.taps_fast ? i / taps : i % plan.words;
      const int tap = plan.taps_fast ? i % taps : i / plan.words;
      const int jw = tap % dim_w.taps;
      const int jh = (tap / dim_w.taps) % dim_h.taps;
      const int jd = tap / (dim_w.taps * dim_h.taps);
      const int d = dim_d.off0 + jd * dim_d.off_step - dim_d.tile_lo;
      const int h = dim_h.off0 + jh * dim_h.off_step - dim_h.tile_lo;
      const int w = dim_w.off0 + jw * dim_w.off_step - dim_w.tile_lo;
      offset = word * plan.plane + (d * plan.halo[1] + h) * plan.pitch + w;
    }
    int* const pair = reinterpret_cast<int*>(offsets + (i / 8) * 4 + (i & 3));
    pair[(i >> 2) & 1] = offset * 4;
  }
  // Halo position -> coordinates (ten bits each, -1 for the padding of a row) and offset in x from the halo's origin.
  for (int i = tid; i < halo_positions; i += kConvThreads) {
    const int w = i % plan.pitch;
    const int h = (i / plan.pitch) % plan.halo[1];
    const int d = i / (plan.pitch * plan.halo[1]);
    const int64_t offset = d * p.x_stride[0] + h * p.x_stride[1] + w * p.x_stride[2];
    halo_map[i] = make_int2(w < plan.halo[2] ? (d << 20 | h << 10 | w) : -1, static_cast<int>(offset));
  }
  if (plan.zero_plane) {
    for (int i = tid; i < plan.plane; i += kConvThreads) {
      for (int part = 0; part < 2 * kSplit; ++part) halo[part * halo_lo + plan.words * plan.plane + i] = 0;
    }
  }

  // Rows of this thread: position inside the tile and where its receptive field starts in the halo.
  const int mask_w = (1 << plan.tile_log2[2]) - 1;
  const int mask_h = (1 << plan.tile_log2[1]) - 1;
  int row_base[kMB][2];
  auto row_coords = [&](int mb, int half, int& d, int& h, int& w) {
    const int m = (warp * kMB + mb) * 16 + half * 8 + g;
    w = m & mask_w;
    h = (m >> plan.tile_log2[2]) & mask_h;
    d = m >> (plan.tile_log2[2] + plan.tile_log2[1]);
  };
#pragma unroll
  for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int d, h, w;
      row_coords(mb, half, d, h, w);
      row_base[mb][half] =
          ((d * plan.in_step[0] * plan.halo[1] + h * plan.in_step[1]) * plan.pitch + w * plan.in_step[2]) * 4;
    }
  }

  const int c_begin = n_tile * kColumns;  // first output channel of this block, within the conv group
  const int c_valid = min(kColumns, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels
  const float* const bias = p.bias + (int64_t(group) * plan.n_tiles + n_tile) * kColumns;

  if (kLse) {
    // Constants of this sample's channels, see the epilogue. A padded column gets -inf and drops out of the sum.
    for (int c = tid; c < kColumns; c += kConvThreads) {
      float4 v = make_float4(0.f, 0.f, 0.f, -INFINITY);
      if (c < c_valid) {
        // mean, rstd, weight, bias of the norm
        const float4 norm = reinterpret_cast<const float4*>(p.norm_table)[n * p.c_out_total + c];
        const float scale = kAccurateTanh ? 2.f * kLog2E : 1.f;
        v = make_float4(bias[c] - norm.x, norm.y * norm.z * scale, norm.w * scale,
                        bias[c] + (kAccurateTanh ? 2.f / 3.f : 0.f));
      }
      reinterpret_cast<float4*>(scratch)[c] = v;
    }
  }

  // One instance for statistics of what is stored and for statistics alone: y is null then.
  const bool stores = kStore && (!kStats || p.y != nullptr);
  ShiftedSums<float> sums[kStats ? kNB * 2 : 1];
  float count = 0.f;

  const Element* const x_sample =
      static_cast<const Element*>(p.x) + n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
  const int64_t chunk_words = int64_t(plan.k_steps_max) * kNB * 64 * kSplit;
  const uint32_t* const packed = p.packed_weight + cls * plan.packed_class_words +
                                 (int64_t(group) * plan.n_tiles + n_tile) * plan.chunks * chunk_words;

  const int tile_begin = static_cast<int>(slice * plan.tiles_per_slice);
  const int tile_count =
      static_cast<int>(min(plan.tiles_per_slice, plan.tiles_per_sample - slice * plan.tiles_per_slice));
  const int tiles_w = static_cast<int>(plan.tiles[2]);
  const int tiles_h = static_cast<int>(plan.tiles[1]);
  TileCursor cursor{tile_begin / (tiles_w * tiles_h), tile_begin / tiles_w % tiles_h, tile_begin % tiles_w};
  TileCursor load_cursor = cursor;
  int load_chunk = 0;

  // Starts filling a stage with the halo (and, where they change, the weights) of the next tile and channel chunk.
  auto load_step = [&](int stage, bool with_weights) {
    if (with_weights) {
      const uint32_t* const src = packed + load_chunk * chunk_words;
      uint32_t* const dst = weights + stage * weight_stage;
      for (int i = tid; i < k_steps * kNB * 16 * kSplit; i += kConvThreads) cp_async_16(dst + i * 4, src + i * 4);
    }
    const int in_d = (load_cursor.d << plan.tile_log2[0]) * plan.in_step[0] + dim_d.tile_lo;
    const int in_h = (load_cursor.h << plan.tile_log2[1]) * plan.in_step[1] + dim_h.tile_lo;
    const int in_w = (load_cursor.w << plan.tile_log2[2]) * plan.in_step[2] + dim_w.tile_lo;
    const int c_begin_in = load_chunk * plan.words * kPerWord;
    const int words_valid = (p.c_in - c_begin_in + kPerWord - 1) / kPerWord;
    const Element* const origin =
        x_sample + c_begin_in * p.x_stride_c + in_d * p.x_stride[0] + in_h * p.x_stride[1] + in_w * p.x_stride[2];
    const bool interior = in_d >= 0 && in_h >= 0 && in_w >= 0 && in_d + plan.halo[0] <= p.in[0] &&
                          in_h + plan.halo[1] <= p.in[1] && in_w + plan.halo[2] <= p.in[2];
    uint32_t* const dst_stage = halo + stage * halo_stage;
    for (int i = tid; i < halo_positions; i += kConvThreads) {
      const int2 entry = halo_map[i];
      if (entry.x < 0) continue;
      bool inside = interior;
      if (!interior) {
        const int d = in_d + (entry.x >> 20);
        const int h = in_h + ((entry.x >> 10) & 1023);
        const int w = in_w + (entry.x & 1023);
        inside = unsigned(d) < unsigned(p.in[0]) && unsigned(h) < unsigned(p.in[1]) && unsigned(w) < unsigned(p.in[2]);
      }
      const int words_inside = inside ? words_valid : 0;
      const Element* src = origin + static_cast<uint32_t>(entry.y);
      if (!inside) src = x_sample;  // not read, but cp.async wants an address it could read
      uint32_t* dst = dst_stage + i;
      if (kPerWord == 1 || p.x_pair_load) {
#pragma unroll 4
        for (int word = 0; word < plan.words; ++word) {
          cp_async<4>(dst, src, word < words_inside);
          src += kPerWord * p.x_stride_c;
          dst += plan.plane;
        }
      } else {
        // Two half values from two planes make a word: through registers, eight words in flight.
        const unsigned short* bits = reinterpret_cast<const unsigned short*>(src);
        for (int word0 = 0; word0 < plan.words; word0 += 8) {
          uint32_t v[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const int c = c_begin_in + (word0 + j) * 2;
            const bool load = word0 + j < words_inside && word0 + j < plan.words;
            const uint32_t low = load ? __ldg(bits) : 0u;
            const uint32_t high = load && c + 1 < p.c_in ? __ldg(bits + p.x_stride_c) : 0u;
            v[j] = low | high << 16;
            bits += 2 * p.x_stride_c;
          }
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            if (word0 + j < plan.words) dst[(word0 + j) * plan.plane] = v[j];
          }
        }
      }
    }
    cp_async_commit();
    if (++load_chunk == plan.chunks) {
      load_chunk = 0;
      load_cursor.advance(tiles_h, tiles_w);
    }
  };

  // Rounds what this thread has loaded to TF32 (or splits it), once for all taps that will read it.
  auto round_step = [&](int stage) {
    if constexpr (kMath == ConvMath::kTf32 || kMath == ConvMath::kTf32x3) {
      for (int i = tid; i < halo_positions; i += kConvThreads) {
        uint32_t* const at = halo + stage * halo_stage + i;
#pragma unroll 4
        for (int word = 0; word < plan.words; ++word) {
          uint32_t* const w = at + word * plan.plane;
          if constexpr (kMath == ConvMath::kTf32) {
            *w = to_tf32(__uint_as_float(*w));
          } else {
            split_tf32(__uint_as_float(*w), w, w + halo_lo);
          }
        }
      }
    }
  };

  const int steps = tile_count * plan.chunks;
  __syncthreads();  // the halo map
  load_step(0, true);
  int step = 0;
  const uint32_t halo_address = static_cast<uint32_t>(__cvta_generic_to_shared(halo));
  for (int tile = 0; tile < tile_count; ++tile, cursor.advance(tiles_h, tiles_w)) {
    float acc[kMB][kNB][4];
#pragma unroll
    for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
      for (int nb = 0; nb < kNB; ++nb) {
#pragma unroll
        // With statistics alone the products are summed onto minus the shift, which saves subtracting it later.
        for (int i = 0; i < 4; ++i) acc[mb][nb][i] = kStats && !stores ? -sums[nb * 2 + (i & 1)].shift : 0.f;
      }
    }

    for (int chunk = 0; chunk < plan.chunks; ++chunk, ++step) {
      const int stage = step & 1;
      cp_async_wait_all();
      round_step(stage);
      __syncthreads();  // this stage is complete for all threads, and all have read the other
      if (step + 1 < steps) load_step(stage ^ 1, plan.chunks > 1);
      const uint32_t stage_address = halo_address + stage * halo_stage * 4;
      const uint2* const weights_now = reinterpret_cast<const uint2*>(weights + stage * weight_stage) + lane;

      // a[mb][i] of the fragment, part 0 (or the low part, 1) of the planes.
      auto load_a = [&](uint32_t (&a)[kMB][4], int2 offset, uint32_t part_address) {
#pragma unroll
        for (int mb = 0; mb < kMB; ++mb) {
          a[mb][0] = load_shared(part_address + row_base[mb][0] + offset.x);
          a[mb][1] = load_shared(part_address + row_base[mb][1] + offset.x);
          a[mb][2] = load_shared(part_address + row_base[mb][0] + offset.y);
          a[mb][3] = load_shared(part_address + row_base[mb][1] + offset.y);
        }
      };

#pragma unroll(kMath == ConvMath::kTf32x3 ? 1 : 3)
      for (int ks = 0; ks < k_steps; ++ks) {
        const int2 offset = offsets[ks * 4 + t];
        const uint2* const b_frag = weights_now + ks * kNB * 32 * kSplit;
        uint32_t a[kMB][4];
        load_a(a, offset, stage_address);
        if constexpr (kMath == ConvMath::kTf32x3) {
          uint32_t a_lo[kMB][4];
          load_a(a_lo, offset, stage_address + halo_lo * 4);
#pragma unroll
          for (int nb = 0; nb < kNB; ++nb) {
            const uint2 b = b_frag[nb * 64];
            const uint2 b_lo = b_frag[nb * 64 + 32];
#pragma unroll
            for (int mb = 0; mb < kMB; ++mb) mma_tf32x3(acc[mb][nb], a[mb], a_lo[mb], b.x, b.y, b_lo.x, b_lo.y);
          }
        } else {
#pragma unroll
          for (int nb = 0; nb < kNB; ++nb) {
            const uint2 b = b_frag[nb * 32];
#pragma unroll
            for (int mb = 0; mb < kMB; ++mb) {
              if constexpr (kMath == ConvMath::kTf32) mma_tf32(acc[mb][nb], a[mb], b.x, b.y);
              if constexpr (kMath == ConvMath::kBf16) mma_bf16(acc[mb][nb], a[mb], b.x, b.y);
              if constexpr (kMath == ConvMath::kFp16) mma_fp16(acc[mb][nb], a[mb], b.x, b.y);
            }
          }
        }
      }
    }

    const int q_d = cursor.d << plan.tile_log2[0];
    const int q_h = cursor.h << plan.tile_log2[1];
    const int q_w = cursor.w << plan.tile_log2[2];
    // Epilogue. valid: the row is an output position of this class.
    bool valid[kMB][2];
    int64_t position[kMB][2];  // offset of the row in y
#pragma unroll
    for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int d, h, w;
        row_coords(mb, half, d, h, w);
        valid[mb][half] = q_d + d < dim_d.q_count && q_h + h < dim_h.q_count && q_w + w < dim_w.q_count;
        const int64_t out_d = (q_d + d) * out_step_d + residue_d;
        const int64_t out_h = (q_h + h) * out_step_h + residue_h;
        const int64_t out_w = (q_w + w) * out_step_w + residue_w;
        position[mb][half] = n * p.y_stride_n + out_d * p.y_stride[0] + out_h * p.y_stride[1] + out_w * p.y_stride[2];
      }
    }

    if (kStore && stores) {
#pragma unroll
      for (int nb = 0; nb < kNB; ++nb) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float b = bias[nb * 8 + t * 2 + i];
#pragma unroll
          for (int mb = 0; mb < kMB; ++mb) {
            acc[mb][nb][i] += b;
            acc[mb][nb][i + 2] += b;
          }
        }
      }
    }
    if (kStore && stores) {
      Element* const y = static_cast<Element*>(p.y);
#pragma unroll
      for (int nb = 0; nb < kNB; ++nb) {
#pragma unroll
        for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int c = nb * 8 + t * 2 + (i & 1);
            float v = acc[mb][nb][i];
            if (p.relu) v = v < 0.f ? 0.f : v;
            // Statistics are those of the stored tensor, as a GroupNorm that reads it would see it.
            if (kStats) acc[mb][nb][i] = to_acc(from_acc<Element>(v));
            if (valid[mb][i >> 1] && c < c_valid) {
              y[position[mb][i >> 1] + int64_t(c_first + c) * p.y_stride_c] = from_acc<Element>(v);
            }
          }
        }
      }
    }
    if constexpr (kStats) {
      const bool first = count == 0.f;
      if (first) {
#pragma unroll
        for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (valid[mb][half]) {
#pragma unroll
              for (int nb = 0; nb < kNB; ++nb) {
                sums[nb * 2].shift = acc[mb][nb][half * 2];
                sums[nb * 2 + 1].shift = acc[mb][nb][half * 2 + 1];
              }
            }
          }
        }
      }
      if (first || stores) {
#pragma unroll
        for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
          for (int nb = 0; nb < kNB; ++nb) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[mb][nb][i] -= sums[nb * 2 + (i & 1)].shift;
          }
        }
      }
#pragma unroll
      for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!valid[mb][half]) continue;
          count += 1.f;
#pragma unroll
          for (int nb = 0; nb < kNB; ++nb) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              ShiftedSums<float>& s = sums[nb * 2 + i];
              const float v = acc[mb][nb][half * 2 + i];
              s.sum += v;
              s.sum_sq = fmaf(v, v, s.sum_sq);
            }
          }
        }
      }
    }
    if constexpr (kLse) {
      const float4* const table = reinterpret_cast<const float4*>(scratch);
      float maximum[kMB][2];
#pragma unroll
      for (int mb = 0; mb < kMB; ++mb) maximum[mb][0] = maximum[mb][1] = -INFINITY;
#pragma unroll
      for (int nb = 0; nb < kNB; ++nb) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = nb * 8 + t * 2 + i;
          const float4 norm = table[c];
#pragma unroll
          for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              // v = conv + bias, z = (v - mean) * rstd * gamma + beta, t = tanh(z). Since |t| <= 1, hardswish needs no
              // clamp: r = v + t (t + 3) / 6. With q = 1 / (1 + exp(2z)), t = 1 - 2q and r = v + 2/3 + q (2q - 5) / 3.
              const float conv = acc[mb][nb][half * 2 + i];
              const float z = fmaf(conv + norm.x, norm.y, norm.z);
              float r;
              if constexpr (kAccurateTanh) {
                const float q = rcp_approx(1.f + exp2_approx(z));
                r = fmaf(q, fmaf(q, 2.f / 3.f, -5.f / 3.f), conv + norm.w);
              } else {
                const float t = tanh_approx(z);
                r = fmaf(t, fmaf(t, 1.f / 6.f, 0.5f), conv + norm.w);
              }
              acc[mb][nb][half * 2 + i] = r;
              maximum[mb][half] = fmaxf(maximum[mb][half], r);
            }
          }
        }
      }
#pragma unroll
      for (int mb = 0; mb < kMB; ++mb) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float m = maximum[mb][half];
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          if (fabsf(m) == INFINITY) m = 0.f;  // as torch.logsumexp: an infinite maximum comes out as it is
          const float shift = -m * kLog2E;
          float sum = 0.f;
#pragma unroll
          for (int nb = 0; nb < kNB; ++nb) {
            sum += exp2_approx(fmaf(acc[mb][nb][half * 2], kLog2E, shift)) +
                   exp2_approx(fmaf(acc[mb][nb][half * 2 + 1], kLog2E, shift));
          }
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          if (t == 0 && valid[mb][half]) static_cast<float*>(p.y)[position[mb][half]] = m + logf(sum);
        }
      }
    }
  }

  if constexpr (kStats) {
    // Thread -> warp (rows of one channel lie in the lanes of equal t) -> block, always in the same order.
    Moments<float>* const shared = reinterpret_cast<Moments<float>*>(scratch);
#pragma unroll
    for (int j = 0; j < kNB * 2; ++j) {
      const Moments<float> m = warp_merge(sums[j].moments(count), 4);
      if (g == 0) shared[warp * kColumns + (j / 2) * 8 + t * 2 + (j & 1)] = m;
    }
    __syncthreads();
    const int64_t all_slices = plan.slices * plan.classes[0] * plan.classes[1] * plan.classes[2];
    // Without a stored tensor the bias was left out of the sums: it moves the mean and nothing else.
    float* const out = p.partials + ((n * all_slices + cls * plan.slices + slice) * p.c_out_total + c_first) * 3;
    for (int c = tid; c < c_valid; c += kConvThreads) {
      Moments<float> m = shared[c];
      for (int w = 1; w < kConvWarps; ++w) merge(m, shared[w * kColumns + c]);
      out[c * 3] = stores ? m.mean : m.mean + bias[c];
      out[c * 3 + 1] = m.m2;
      out[c * 3 + 2] = m.count;
    }
  }
}

}  // namespace kgopt
