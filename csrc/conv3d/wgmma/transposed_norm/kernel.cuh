// ConvTranspose + ReLU + GroupNorm of stride 1 in one launch, sm_90a: an implicit GEMM on wgmma with the norm behind
// it.
//
// D[channel][q] = sum over taps and input channels of w[tap][channel][:] x[q + shift(tap)][:], 128 channels by a run of
// positions a tile, half of the channels for each computing warpgroup; x is the padded copy of
// conv3d/wgmma/transposed_norm/params.h, so that a tap is another first row of the same stage in shared memory. Weights
// come through a ring for each warpgroup: one then goes on at the tensor cores' full rate while the other stores its
// outputs. Accumulators hold neighbouring positions of a channel, as the contiguous output wants them. Of the warps
// that do not compute, one loads and the others normalize earlier samples, which lie in L2; all warps together take the
// last. Where a backward needs the convolution's output, the norm is written to another tensor.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/wgmma/common.cuh"
#include "conv3d/wgmma/transposed_norm/normalize.cuh"
#include "conv3d/wgmma/transposed_norm/params.h"
#include "conv3d/wgmma/transposed_norm/plan.h"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void tensor_load_3d(uint32_t shared, const void* map, int c, int slot, int n,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared),
      "l"(map), "r"(c), "r"(slot), "r"(n), "r"(shared_address(barrier))
      : "memory");
}
#endif

struct TransposedNormTile {
  int n, m_tile;
  int q0;  // first position
  DepthTaps kd;
};

// A row of a whole tile, of which this thread holds two positions in every eight: the four threads of the row exchange
// them for vectors of 16 bytes, which fill sectors. `value(i)`: of its positions in order; `to`: where the row begins.
template <typename Element, int kN, typename Value>
__device__ __forceinline__ void store_transposed_norm_row(Element* to, const Value& value) {
  const int t4 = threadIdx.x % 4;
  const bool odd = t4 % 2 != 0, upper = t4 / 2 != 0;
  auto pair_of = [&](int block) {
    const float v[2] = {value(block * 2), value(block * 2 + 1)};
    return pack<Element, 2>(v);
  };
  constexpr int kGroup = sizeof(Element) == 4 ? 2 : 4;  // blocks of 8 positions
  constexpr int kBlocks = kN / 8, kWhole = kBlocks / kGroup * kGroup;
#pragma unroll
  for (int block = 0; block < kWhole; block += kGroup) {
    uint4 v;
    if constexpr (sizeof(Element) == 4) {
      const Vec<Element, 2> a = pair_of(block), b = pair_of(block + 1);
      const float keep0 = odd ? b.v[0] : a.v[0], keep1 = odd ? b.v[1] : a.v[1];
      const float other0 = __shfl_xor_sync(0xffffffff, odd ? a.v[0] : b.v[0], 1);
      const float other1 = __shfl_xor_sync(0xffffffff, odd ? a.v[1] : b.v[1], 1);
      v.x = __float_as_uint(odd ? other0 : keep0), v.y = __float_as_uint(odd ? other1 : keep1);
      v.z = __float_as_uint(odd ? keep0 : other0), v.w = __float_as_uint(odd ? keep1 : other1);
      *reinterpret_cast<uint4*>(to + (block + odd) * 8 + upper * 4) = v;
    } else {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vec<Element, 2> p = pair_of(block + i);
        w[i] = reinterpret_cast<const uint32_t&>(p);
      }
      // Neighbours first: an even thread goes on with the first of two blocks, an odd one with the second.
      const uint32_t first = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1);
      const uint32_t second = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
      const uint32_t a0 = odd ? first : w[0], a1 = odd ? w[1] : first;
      const uint32_t b0 = odd ? second : w[2], b1 = odd ? w[3] : second;
      const uint32_t c0 = __shfl_xor_sync(0xffffffff, upper ? a0 : b0, 2);
      const uint32_t c1 = __shfl_xor_sync(0xffffffff, upper ? a1 : b1, 2);
      v = upper ? make_uint4(c0, c1, b0, b1) : make_uint4(a0, a1, c0, c1);
      *reinterpret_cast<uint4*>(to + (block + t4) * 8) = v;
    }
  }
#pragma unroll
  for (int block = kWhole; block < kBlocks; ++block) store_vec(to + block * 8 + t4 * 2, pair_of(block));
}

template <int kN>
__device__ __forceinline__ TransposedNormTile transposed_norm_tile(const TransposedNormPlan& plan, int tile) {
  TransposedNormTile t;
  const int rest = plan.by_m_tiles(tile);
  t.m_tile = tile - rest * plan.m_tiles;
  t.n = plan.by_tiles_per_sample(rest);
  // Tiles at both ends of the depth have fewer taps: from sample to sample they fall to the next blocks.
  int index =
      rest - t.n * plan.tiles_per_sample + plan.first_short - transposed_norm_short_place(plan.short_step, t.n, plan);
  if (index < 0) index += plan.tiles_per_sample;
  if (index >= plan.tiles_per_sample) index -= plan.tiles_per_sample;
  t.q0 = index * (kN * kWgmmaConsumers);
  const int span = (plan.taps[0] - 1) * plan.dilation[0];
  const int lo = plan.by_plane(t.q0) - span;
  const int hi = min(plan.by_plane(t.q0 + kN * kWgmmaConsumers - 1), plan.out[0] - 1) - span;
  t.kd = depth_taps(lo, hi, plan.in[0], plan.taps[0], plan.dilation[0]);
  return t;
}

// kScaled: x and y are fp32, the operands fp16.
template <ConvMath kMath, int kN, bool kScaled>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    conv_transposed_norm_kernel(const __grid_constant__ TransposedNormParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Operand = typename WgmmaTypes<kMath>::Element;
  using Element = std::conditional_t<kScaled, float, Operand>;
  constexpr int kParts = kMath == ConvMath::kTf32x3 ? 2 : 1;
  constexpr int kVec = 16 / sizeof(Element);
  extern __shared__ char smem_unaligned[];
  const TransposedNormPlan& plan = p.plan;
  const TransposedNormSmemLayout layout = transposed_norm_smem_layout(plan);
  const uint32_t unaligned = shared_address(smem_unaligned);
  char* const smem = smem_unaligned + ((unaligned + 1023) / 1024 * 1024 - unaligned);
  uint64_t* const x_full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const x_empty = x_full + kTransposedNormMaxStages;
  uint64_t* const w_full = x_empty + kTransposedNormMaxStages;  // of each warpgroup's ring
  uint64_t* const w_empty = w_full + kWgmmaConsumers * kTransposedNormMaxStages;
  uint64_t* const lagging = w_empty + kWgmmaConsumers * kTransposedNormMaxStages;
  uint64_t* const stored = lagging + 1;  // of samples by parity: this block's tiles are in memory
  uint64_t* const taken = stored + 2;    // their moments have been read
  uint64_t* const piece_full = taken + 2;
  uint32_t* const claim = reinterpret_cast<uint32_t*>(piece_full + kTransposedNormPieces * kTransposedNormHelpers);
  const TransposedNormMoments moments{reinterpret_cast<float*>(smem + layout.moments),
                                      plan.m_tiles * kTransposedNormChannels};
  float4* const table = reinterpret_cast<float4*>(smem + layout.table);
  const int tid = threadIdx.x;
  const int warpgroup = __shfl_sync(0xffffffff, tid / 128, 0);
  const int lane = tid & 31;
  const int x_bytes = transposed_norm_x_stage_bytes(plan);
  const int groups_h = plan.whole_height ? 1 : plan.taps[1];
  const int rows_h = plan.whole_height ? plan.taps[1] : 1;  // of the height's taps in a stage
  const int positions = plan.out[0] * plan.plane;
  const int64_t sample_elements = int64_t(p.c_out) * positions;
  const int w_ring_bytes = plan.w_stages * kTransposedNormHalfBytes;

  if (tid == 0) {
    for (int i = 0; i < kTransposedNormMaxStages; ++i) {
      barrier_init(x_full + i, 1);
      barrier_init(x_empty + i, kWgmmaConsumers * 4);
    }
    for (int i = 0; i < kWgmmaConsumers * kTransposedNormMaxStages; ++i) {
      barrier_init(w_full + i, 1);
      barrier_init(w_empty + i, 4);
    }
    barrier_init(lagging, 4);
    for (int i = 0; i < 2; ++i) {
      barrier_init(stored + i, kWgmmaConsumers * 128);
      barrier_init(taken + i, 32);
    }
    for (int i = 0; i < kTransposedNormPieces * kTransposedNormHelpers; ++i) barrier_init(piece_full + i, 1);
    claim[0] = static_cast<uint32_t>(p.n - 1) << 16;
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == kWgmmaConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const int warp = (tid / 32) % 4;
    if (warp == 0) {
      if (lane != 0) return;
      wait_for_prerequisites();
      const uint64_t policy = evict_normal_policy();
      const int images = plan.taps[1] * plan.taps[2] * kParts;  // of a tap of the depth and a chunk
      // The low part of x meets high parts of weights only.
      const int loads = kParts == 2 ? images / 2 * 3 : images;
      const int step_h = plan.dilation[1] * plan.out[2], step_d = plan.dilation[0] * plan.plane;
      struct Ring {
        StageCursor s;
        int tile = blockIdx.x, groups = 0, load = 0;
        const char* group = nullptr;
      } rings[kWgmmaConsumers];
      bool left = true;  // something to load
      auto feed_weights = [&](auto of_ring) {
        constexpr int i = decltype(of_ring)::value;
        Ring& ring = rings[i];
        if (ring.groups == 0) {
          if (ring.tile >= int(plan.tiles)) return false;
          const TransposedNormTile t = transposed_norm_tile<kN>(plan, ring.tile);
          ring.tile += gridDim.x;
          ring.groups = (t.kd.end - t.kd.first) * plan.chunks;
          ring.group =
              static_cast<const char*>(p.packed) + i * kTransposedNormHalfBytes +
              int64_t(t.m_tile * plan.taps[0] + t.kd.first) * plan.chunks * images * kTransposedNormWeightBytes;
        }
        left = true;
        uint64_t* const full = w_full + i * kTransposedNormMaxStages + ring.s.stage;
        if (!barrier_test(full + (w_empty - w_full), ring.s.parity ^ 1)) return false;
        const int image = ring.load < images ? ring.load : (ring.load - images) * 2;
        barrier_expect_bytes(full, kTransposedNormHalfBytes);
        bulk_load(smem + layout.weights + i * w_ring_bytes + ring.s.stage * kTransposedNormHalfBytes,
                  ring.group + image * kTransposedNormWeightBytes, kTransposedNormHalfBytes, full, policy);
        ring.s.advance(plan.w_stages);
        if (++ring.load == loads) {
          ring.load = 0, --ring.groups;
          ring.group += images * kTransposedNormWeightBytes;
        }
        return true;
      };
      struct {
        StageCursor s;
        int tile = blockIdx.x, n = -1, slot = 0, kd = 0, part = 0, group = 0;  // kd: how many are left
        int gone = 0;     // copies of x that outputs of the samples so far overwrite
        int awaits = -1;  // the last of them, where not all blocks are known to have read it
      } xs;
      auto feed_x = [&] {
        if (xs.kd == 0) {
          if (xs.tile >= int(plan.tiles)) return false;
          const TransposedNormTile t = transposed_norm_tile<kN>(plan, xs.tile);
          xs.tile += gridDim.x;
          xs.kd = t.kd.end - t.kd.first;
          xs.slot = t.q0 - plan.reach + t.kd.first * step_d;
          if (p.x_in_y && t.n != xs.n) {  // the copies that this tile overwrites must have been read
            const int64_t end = (t.n + 1) * sample_elements * int64_t(sizeof(Element)) - p.x_in_y_at;
            const int before = xs.gone;
            while (xs.gone < p.x_split && xs.gone * plan.sample_bytes < end) ++xs.gone;
            // A copy of the sample before is waited for where tiles are stored.
            if (xs.gone > before) xs.awaits = min(xs.gone - 1, t.n - 2);
          }
          xs.n = t.n;
        }
        left = true;
        if (xs.awaits >= 0) {
          if (load_relaxed(p.arrived + xs.awaits) != gridDim.x) return false;
          load_acquire(p.arrived + xs.awaits);
          async_proxy_fence();
          xs.awaits = -1;
        }
        if (!barrier_test(x_empty + xs.s.stage, xs.s.parity ^ 1)) return false;
        barrier_expect_bytes(x_full + xs.s.stage, plan.boxes * plan.box_rows * kTransposedNormRowBytes);
        const uint32_t to = shared_address(smem) + xs.s.stage * x_bytes;
        const bool tail = xs.n >= p.x_split;
        // Parts change before chunks.
        const int column = kParts == 1 ? xs.part : xs.part % 2 * plan.chunks + xs.part / 2;
        for (int box = 0; box < plan.boxes; ++box) {
          tensor_load_3d(to + box * plan.box_rows * kTransposedNormRowBytes, tail ? p.x_tail_map : p.x_map,
                         column * (kTransposedNormRowBytes / int(sizeof(Operand))),
                         xs.slot + xs.group * step_h + box * plan.box_rows, tail ? xs.n - p.x_split : xs.n,
                         x_full + xs.s.stage);
        }
        xs.s.advance(plan.x_stages);
        if (++xs.group == groups_h) {
          xs.group = 0;
          if (++xs.part == plan.chunks * kParts) xs.part = 0, --xs.kd, xs.slot += step_d;
        }
        return true;
      };
      // Whichever has room: neither a ring nor x waits for the others.
      while (left) {
        left = false;
        bool fed = feed_weights(std::integral_constant<int, 0>());
        fed |= feed_weights(std::integral_constant<int, 1>());
        fed |= feed_x();
        if (!fed) __nanosleep(32);
      }
    } else {
      const int helper = warp - (4 - kTransposedNormHelpers);
      char* const pieces = smem + layout.pieces + helper * kTransposedNormPieces * kTransposedNormPieceBytes;
      uint64_t* const full = piece_full + helper * kTransposedNormPieces;
      const uint64_t policy = evict_first_policy();
      wait_for_prerequisites();
      int merged = 0;
      // One of the helpers also publishes this block's moments, as soon as it sees them.
      auto publish = [&] {
        const bool ready = merged < p.n && barrier_test(stored + merged % 2, merged / 2 % 2);
        if (!__all_sync(0xffffffff, ready)) return false;
        publish_transposed_norm_moments(p, moments, merged);
        barrier_arrive(taken + merged % 2);
        __syncwarp();
        if (lane == 0) add_release(p.arrived + merged, 1);
        ++merged;
        return true;
      };
      uint32_t parities = 0;  // of the pieces' barriers, a bit each
      const TransposedNormShare share = transposed_norm_share(static_cast<int>(sample_elements / kVec));
      constexpr int kUnit = kTransposedNormPieceBytes / 16, kAhead = kTransposedNormPieces - 2;
      while (true) {
        if (helper == 0 && lane == 0) claim[1] = claim_transposed_norm_sample(claim, true);
        named_barrier(3, kTransposedNormHelpers * 32);
        const int n = *reinterpret_cast<volatile int*>(claim + 1);
        if (n < 0) break;
        if (helper == 0) {
          while (true) {
            if (publish()) continue;
            if (n < merged && __all_sync(0xffffffff, load_relaxed(p.arrived + n) == gridDim.x)) break;
            __nanosleep(100);
          }
          load_acquire(p.arrived + n);
        }
        named_barrier(3, kTransposedNormHelpers * 32);
        async_proxy_fence();
        const int64_t sample_at = n * sample_elements * int64_t(sizeof(Element));
        const uint4* const sample = reinterpret_cast<const uint4*>(static_cast<const char*>(p.y) + sample_at);
        uint4* const normalized = reinterpret_cast<uint4*>(static_cast<char*>(p.z) + sample_at);
        const int first = share.first + helper * kUnit, step = kTransposedNormHelpers * kUnit;
        int next = first, next_buffer = 0;  // to be loaded
        auto load = [&] {
          if (lane == 0 && next < share.end) {
            const uint32_t bytes = min(kUnit, share.end - next) * 16;
            barrier_expect_bytes(full + next_buffer, bytes);
            bulk_load(pieces + next_buffer * kTransposedNormPieceBytes, sample + next, bytes, full + next_buffer,
                      policy);
          }
          next += step;
          if (++next_buffer == kTransposedNormPieces) next_buffer = 0;
        };
        if (lane == 0) bulk_store_wait_read<0>();
        for (int i = 0; i < kAhead; ++i) load();
        make_norm_table(p, n, share, table, helper, kTransposedNormHelpers);  // while these come
        named_barrier(3, kTransposedNormHelpers * 32);
        int buffer = 0;
        for (int piece = first; piece < share.end; piece += step) {
          // The next goes where the piece before the last was, which may still be on its way out.
          if (lane == 0) bulk_store_wait_read<1>();
          load();
          barrier_wait(full + buffer, parities >> buffer & 1);
          parities ^= 1u << buffer;
          uint4* const vectors = reinterpret_cast<uint4*>(pieces + buffer * kTransposedNormPieceBytes);
          const int count = min(kUnit, share.end - piece), channel = plan.by_channel(piece);
          if (count == kUnit && channel == plan.by_channel(piece + kUnit - 1)) {
            const float4 t = table[channel];
            uint4 v[kUnit / 32];
#pragma unroll
            for (int i = 0; i < kUnit / 32; ++i) v[i] = vectors[i * 32 + lane];
#pragma unroll
            for (int i = 0; i < kUnit / 32; ++i) vectors[i * 32 + lane] = normalize_vector<Element>(v[i], t);
          } else {
            for (int i = lane; i < count; i += 32) {
              vectors[i] = normalize_vector<Element>(vectors[i], table[plan.by_channel(piece + i)]);
            }
          }
          wgmma_fence_shared();
          __syncwarp();
          if (lane == 0) {
            bulk_store(normalized + piece, vectors, count * 16);
            bulk_store_commit();
          }
          if (++buffer == kTransposedNormPieces) buffer = 0;
          if (helper == 0) publish();
        }
      }
      if (helper == 0) {
        while (merged < p.n) {
          if (!publish()) __nanosleep(100);
        }
      }
      if (lane == 0) bulk_store_wait_read<0>();  // before this block's shared memory is another's
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  wait_for_prerequisites();
  const int warp = (tid / 32) % 4;
  const int g = lane >> 2, t4 = lane & 3;
  const uint32_t x_rows = shared_address(smem);
  const uint32_t w_rows = x_rows + layout.weights + warpgroup * w_ring_bytes;
  const int own_row =
      warpgroup * kTransposedNormHalfChannels + warp * 16 + g;  // of a tile's channels, and eight behind it
  uint64_t* const own_full = w_full + warpgroup * kTransposedNormMaxStages;
  uint64_t* const own_empty = w_empty + warpgroup * kTransposedNormMaxStages;
  const int step_h = plan.dilation[1] * plan.out[2], step_w = plan.dilation[2];
  StageCursor x, w;
  int lag = warpgroup == 0 ? plan.lag : 0;
  float acc[2][kN / 2];
  // The tensor cores cut sums off instead of rounding them. For fp32 accuracy they add up a stage of x at a time.
  constexpr bool kPromotes = kMath == ConvMath::kTf32x3;
  float total[2][kPromotes ? kN / 2 : 1];
  int open = -1;       // the sample whose moments are being gathered
  int free_below = 0;  // up to this one the place of the output is no longer that of a copy
  auto open_next = [&] {
    if (open >= 0) barrier_arrive(stored + open % 2);
    ++open;
    barrier_wait(taken + open % 2, (open / 2 & 1) ^ 1);
    if (t4 < 2) {  // as in add_transposed_norm_moments
      for (int m_tile = 0; m_tile < plan.m_tiles; ++m_tile) {
        moments.store(open % 2, m_tile * kTransposedNormChannels + own_row + t4 * 8, Moments<float>());
      }
    }
  };

  for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
    const TransposedNormTile t = transposed_norm_tile<kN>(plan, tile);
    while (open < t.n) open_next();  // not later: the loads of this tile may wait for earlier samples
    if (warpgroup > 0 && plan.lag > 0) barrier_wait(lagging, 0);  // of the first tile; later it is open
    const int c0 = t.m_tile * kTransposedNormChannels + own_row;
    const float bias[2] = {__ldg(p.bias + c0), __ldg(p.bias + c0 + 8)};  // of this thread's channels
    const int stages = (t.kd.end - t.kd.first) * plan.chunks * kParts * groups_h;
    int x_done = -1, w_done = -1;
    bool add = false;
    if constexpr (kPromotes) {
#pragma unroll
      for (int i = 0; i < kN; ++i) total[i % 2][i / 2] = 0.f;
    }
    for (int stage = 0; stage < stages; ++stage) {
      barrier_wait(x_full + x.stage, x.parity);
      const int images = kParts == 2 && stage / groups_h % 2 == 0 ? 2 : 1;
      for (int kh = 0; kh < rows_h; ++kh) {
        for (int kw = 0; kw < plan.taps[2]; ++kw) {
          const uint64_t x_descriptor = wgmma_swizzled_descriptor<kTransposedNormRowBytes>(
              x_rows + x.stage * x_bytes + (kh * step_h + kw * step_w) * kTransposedNormRowBytes);
          for (int image = 0; image < images; ++image) {
            barrier_wait(own_full + w.stage, w.parity);
            const uint64_t w_descriptor =
                wgmma_swizzled_descriptor<kTransposedNormRowBytes>(w_rows + w.stage * kTransposedNormHalfBytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kTransposedNormRowBytes / 32; ++k) {
#pragma unroll
              for (int run = 0; run < 2; ++run) {
                wgmma_shared<WgmmaTypes<kMath>::kWgmma, kN>(
                    acc[run], w_descriptor + 2 * k, x_descriptor + 2 * k + run * (kN * kTransposedNormRowBytes / 16),
                    k > 0 || add);
              }
            }
            wgmma_commit();
            wgmma_wait<1>();
            add = true;
            if (lag > 0 && --lag == 0 && lane == 0) barrier_arrive(lagging);
            if (lane == 0) {
              if (w_done >= 0) barrier_arrive(own_empty + w_done);
              if (x_done >= 0) barrier_arrive(x_empty + x_done);
            }
            x_done = -1;
            w_done = w.stage;
            w.advance(plan.w_stages);
          }
        }
      }
      x_done = x.stage;
      x.advance(plan.x_stages);
      if constexpr (kPromotes) {
        wgmma_wait<0>();
#pragma unroll
        for (int run = 0; run < 2; ++run) {
          wgmma_use(acc[run]);
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) total[run][i] += acc[run][i];
        }
        add = false;
        if (lane == 0) {
          barrier_arrive(own_empty + w_done);
          barrier_arrive(x_empty + x_done);
        }
        x_done = w_done = -1;
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      wgmma_use(acc[run]);
      if constexpr (kPromotes) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) acc[run][i] = total[run][i];
      }
    }
    if (lane == 0 && !kPromotes) {
      barrier_arrive(own_empty + w_done);
      barrier_arrive(x_empty + x_done);
    }

    if constexpr (kPromotes) {  // whose copy is the largest, and whose tiles take long enough to hide this
      if (p.x_in_y && p.x_ahead == 1 && t.n > free_below) {
        if (lane == 0) await_all_blocks(p, t.n - 1);
        __syncwarp();
        free_below = t.n;
      }
    }
    const int count = min(2 * kN, positions - t.q0);
    float2 factors[2] = {};  // of this thread's channels
    if constexpr (kScaled) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (c0 + row * 8 < p.c_out) factors[row] = __ldg(reinterpret_cast<const float2*>(p.factors) + c0 + row * 8);
      }
    }
#pragma unroll
    for (int run = 0; run < 2; ++run) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        float& v = acc[run][i];
        if constexpr (kScaled) v = v * factors[i / 2 % 2].x * factors[i / 2 % 2].y;
        v += bias[i / 2 % 2];
        if (p.relu) v = fast_relu(v);
      }
    }
    Element* const y = static_cast<Element*>(p.y) + t.n * sample_elements + int64_t(c0) * positions + t.q0;
    auto finish = [&](auto whole) {  // without a branch for each value where the whole tile exists
      constexpr bool kWhole = decltype(whole)::value;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i / 2, run = i % 2;
        Element* const to = y + int64_t(row * 8) * positions + run * kN;
        auto value = [&](int j) { return acc[run][j / 2 * 4 + row * 2 + j % 2]; };
        if (kWhole && t.m_tile * kTransposedNormChannels + (kTransposedNormChannels - 1) < p.c_out) {
          store_transposed_norm_row<Element, kN>(to, value);
        } else if (c0 + row * 8 < p.c_out) {
#pragma unroll
          for (int j = 0; j < kN / 8; ++j) {
            const float v[2] = {value(j * 2), value(j * 2 + 1)};
            if (run * kN + j * 8 + t4 * 2 < count) store_vec(to + j * 8 + t4 * 2, pack<Element, 2>(v));
          }
        }
      }
      // Moments are to be those of what a backward reads.
      if (sizeof(Element) == 2 && p.z != p.y) {
        add_transposed_norm_moments<kN, kWhole, Element>(acc, count, moments, open % 2, c0);
      } else {
        add_transposed_norm_moments<kN, kWhole, float>(acc, count, moments, open % 2, c0);
      }
    };
    if (count == 2 * kN) {
      finish(std::true_type());
    } else {
      finish(std::false_type());
    }
  }
  if (lag > 0 && lane == 0) barrier_arrive(lagging);  // too little work to have come to it
  while (open < p.n - 1) open_next();
  barrier_arrive(stored + open % 2);

  // Nothing is left to compute: this block's share of the last samples, until the helpers have come to them.
  float4* const own_table = reinterpret_cast<float4*>(smem);  // stages are no longer filled
  const TransposedNormShare share = transposed_norm_share(static_cast<int>(sample_elements / kVec));
  while (true) {
    named_barrier(1, kWgmmaConsumers * 128);
    if (tid == 0) claim[2] = claim_transposed_norm_sample(claim, false);
    named_barrier(1, kWgmmaConsumers * 128);
    const int n = *reinterpret_cast<volatile int*>(claim + 2);
    if (n < 0) break;
    if (lane == 0) await_all_blocks(p, n);
    __syncwarp();
    make_norm_table(p, n, share, own_table, warpgroup * 4 + warp, kWgmmaConsumers * 4);
    named_barrier(1, kWgmmaConsumers * 128);
    const uint4* const y = reinterpret_cast<const uint4*>(static_cast<const Element*>(p.y) + n * sample_elements);
    uint4* const z = reinterpret_cast<uint4*>(static_cast<Element*>(p.z) + n * sample_elements);
    constexpr int kUnroll = 10, kStep = kWgmmaConsumers * 128;
    for (int i0 = share.first + tid; i0 < share.end; i0 += kUnroll * kStep) {
      uint4 v[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i0 + i * kStep < share.end) v[i] = __ldcg(y + i0 + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i0 + i * kStep < share.end) {
          z[i0 + i * kStep] = normalize_vector<Element>(v[i], own_table[plan.by_channel(i0 + i * kStep)]);
        }
      }
    }
  }
#endif
}

}  // namespace kgopt
