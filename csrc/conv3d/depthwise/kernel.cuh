// The pass over a tensor whose kernel is 3, 5 or 7 wide at stride 1 or 2. A block has a tile of some channels:
// contiguous tensors, `planes` channels, neighbouring threads have neighbouring rows; channels_last, kDepthwiseLanes
// channels, which neighbouring threads share. A thread has some cells along the width, and keeps the inputs that they
// read in registers. In a volume the block marches along the depth, and a thread keeps the sums of all cells that the
// current plane reaches.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "conv3d/depthwise/tile.cuh"

namespace kgopt {

// Cells from `plan` on that a block computes.
struct DepthwiseBlock {
  int64_t n;
  int channel;     // the first one
  int tile[2];     // along height and width
  int first, end;  // cells of the depth
};

template <int kLanes>
__device__ __forceinline__ DepthwiseBlock depthwise_block(const DepthwiseParams& p, unsigned block) {
  const DepthwisePlan& plan = p.plan;
  DepthwiseBlock b;
  const auto take = [&](int count) {
    const unsigned rest = block / count, index = block - rest * count;
    block = rest;
    return static_cast<int>(index);
  };
  // Channels of a position are neighbours in memory: blocks that run together share its lines.
  if (kLanes > 1) b.channel = take(plan.channel_blocks) * kLanes;
  b.tile[1] = take(plan.tiles[1]);
  b.tile[0] = take(plan.tiles[0]);
  const int segment = take(plan.segments);
  if (kLanes == 1) b.channel = take(plan.channel_blocks) * plan.in.planes;
  b.n = block;
  b.first = segment * plan.segment;
  b.end = min(b.first + plan.segment, p.cells[0]);
  return b;
}

template <int kLanes, DepthwiseMode kMode, int kK, bool kVolume>
struct DepthwiseKernel {
  static constexpr int kUp = depthwise_up(kMode), kStride = depthwise_stride(kMode), kAt = depthwise_taps(kMode, kK);
  static constexpr int kRows = depthwise_cell_rows(kMode, kVolume);
  static constexpr int kColumns = depthwise_cell_columns(kMode, kK, kVolume);
  static constexpr int kWindow = (kColumns - 1) * kStride + kAt;
  static constexpr int kOpen = kVolume ? depthwise_open_cells(kMode, kK) : 1;
  static constexpr int kUpDepth = kVolume ? kUp : 1, kDepth = kVolume ? kStride : 1;
  static constexpr int kWeights = kK * kK * (kVolume ? kK : 1);
  static constexpr int kWeightRow = kK > 4 ? 8 : 4;  // floats from one row of taps to the next, contiguous tensors
  static constexpr bool kKeepsWeights = kVolume && kK == 3 && kMode != DepthwiseMode::kScatter2;
  // Weights do not lie in registers and rows of the window are many: a loop is as fast as its instructions unrolled.
  static constexpr bool kRolled = kVolume && kK > 3 && kMode != DepthwiseMode::kScatter2;
  static constexpr bool kDirect = kLanes == 1 && kMode == DepthwiseMode::kGather1;
  // Pieces that a thread has on their way beside its work, as many as registers allow. At stride 2 an output reads four
  // times as many, and keeps fewer sums.
  static constexpr int kBatch = kStride == 2                                                 ? (kLanes > 1 ? 5 : 4)
                                : kLanes > 1 || (kMode == DepthwiseMode::kGather1 && kK < 7) ? 3
                                                                                             : 2;
  static constexpr int kRest = kBatch > 2 && kK < 7 ? 2 : 1;  // of those beyond
  using In = DepthwiseCopy<kLanes, kRows * kStride, kDepth>;

  // [depth of the cell][up along the depth][row][column]
  float sums[kOpen][kUpDepth][kRows * kUp][kColumns * kUp];

  static __device__ __forceinline__ void load_weights(const DepthwiseParams& p, const DepthwiseBlock& b, float* to) {
    const int channels = kLanes > 1 ? kLanes : p.plan.in.planes;
    for (int i = threadIdx.x; i < channels * kWeights; i += blockDim.x) {
      const int c = kLanes > 1 ? i % kLanes : i / kWeights, tap = kLanes > 1 ? i / kLanes : i - c * kWeights;
      const int row = tap / kK, kw = tap - row * kK, kd = kVolume ? row / kK : 0, kh = row - kd * kK;
      float w = 0.f;
      if (b.channel + c < p.channels) {
        w = load_as<float>(
            p.weight,
            int64_t(b.channel + c) * p.w_stride_c + kd * p.w_stride_k[0] + kh * p.w_stride_k[1] + kw * p.w_stride_k[2],
            p.weight_dtype);
      }
      to[kLanes > 1 ? i : c * p.plan.weight_plane + row * kWeightRow + kw] = w;
    }
  }

  // Taps of one row of the kernel.
  static __device__ __forceinline__ void weight_row(const float* weights, int row, float (&w)[kK]) {
    if constexpr (kLanes > 1) {
#pragma unroll
      for (int i = 0; i < kK; ++i) w[i] = weights[(row * kK + i) * kLanes];
    } else {
      const float4 a = *reinterpret_cast<const float4*>(weights + row * kWeightRow);
      w[0] = a.x, w[1] = a.y, w[2] = a.z;
      if constexpr (kK > 4) {
        const float4 b = *reinterpret_cast<const float4*>(weights + row * kWeightRow + 4);
        w[3] = a.w, w[4] = b.x;
        if constexpr (kK > 5) w[5] = b.y, w[6] = b.z;
      }
    }
  }

  static __device__ __forceinline__ void load_window(const float* row, float (&x)[kWindow]) {
#pragma unroll
    for (int i = 0; i < kWindow; ++i) x[i] = row[i * kLanes];
  }

  static __device__ __forceinline__ void multiply(const float (&x)[kWindow], const float (&w)[kK],
                                                  float (&to)[kColumns * kUp]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int up = 0; up < kUp; ++up) {
#pragma unroll
        for (int at = 0; at < kAt; ++at) {
          if (depthwise_tap(kMode, kK, at, up) < kK) {
            to[c * kUp + up] += x[c * kStride + at] * w[depthwise_tap(kMode, kK, at, up)];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void clear(int cell) {
#pragma unroll
    for (int d = 0; d < kUpDepth; ++d) {
#pragma unroll
      for (int r = 0; r < kRows * kUp; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns * kUp; ++c) sums[cell][d][r][c] = 0.f;
      }
    }
  }
  // The next plane is one cell further.
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int a = kOpen - 1; a > 0; --a) {
#pragma unroll
      for (int d = 0; d < kUpDepth; ++d) {
#pragma unroll
        for (int r = 0; r < kRows * kUp; ++r) {
#pragma unroll
          for (int c = 0; c < kColumns * kUp; ++c) sums[a][d][r][c] = sums[a - 1][d][r][c];
        }
      }
    }
    clear(0);
  }

  // Row `at` of the inputs of the thread's only row of cells, in plane `j` of the step: to all cells that it reaches.
  template <int kPlane>
  __device__ __forceinline__ void add_row(const float* row, const float* weights, const float (&kept)[kK][kK][kK],
                                          int at) {
    float x[kWindow];
    load_window(row, x);
#pragma unroll
    for (int a = 0; a < kOpen; ++a) {
      if (a * kDepth + kPlane >= kAt) continue;
#pragma unroll
      for (int d = 0; d < kUpDepth; ++d) {
        const int kd = depthwise_tap(kMode, kK, a * kDepth + kPlane, d);
        if (kd >= kK) continue;
#pragma unroll
        for (int r = 0; r < kUp; ++r) {
          const int kh = depthwise_tap(kMode, kK, at, r);
          if (kMode == DepthwiseMode::kScatter2 && kh >= kK) continue;
          if constexpr (kKeepsWeights) {
            multiply(x, kept[kd][kh], sums[a][d][r]);
          } else {
            float w[kK];
            weight_row(weights, kd * kK + kh, w);
            multiply(x, w, sums[a][d][r]);
          }
        }
      }
    }
  }

  // A plane of a volume's inputs.
  template <int kPlane>
  __device__ __forceinline__ void add_plane(const float* x, int step, int row_floats, const float* weights,
                                            const float (&kept)[kK][kK][kK]) {
    if constexpr (kRolled) {
#pragma unroll 1
      for (int at = 0; at < kAt; ++at) {
        const int slot = (at & (kStride - 1)) * step + at / kStride;
        add_row<kPlane>(x + slot * row_floats, weights, kept, at);
      }
    } else {
#pragma unroll
      for (int at = 0; at < kAt; ++at) {
        const int slot = (at & (kStride - 1)) * step + at / kStride;
        add_row<kPlane>(x + slot * row_floats, weights, kept, at);
      }
    }
  }

  // All rows of the thread's cells in a plane that is for itself.
  __device__ __forceinline__ void add_rows(const float* x, int step, int row_floats, const float* weights) {
    constexpr int kAlternate = kRows * kStride;
#pragma unroll
    for (int i = 0; i < (kRows - 1) * kStride + kAt; ++i) {
      float window[kWindow];
      load_window(x + ((i % kAlternate) * step + i / kAlternate) * row_floats, window);
#pragma unroll
      for (int cell = 0; cell < kRows; ++cell) {
        const int at = i - cell * kStride;
        if (at < 0 || at >= kAt) continue;
#pragma unroll
        for (int r = 0; r < kUp; ++r) {
          const int kh = depthwise_tap(kMode, kK, at, r);
          if (kh >= kK) continue;
          float w[kK];
          weight_row(weights, kh, w);
          multiply(window, w, sums[0][0][cell * kUp + r]);
        }
      }
    }
  }

  // Channels_last: sums of the cell of depth `cell_d` to memory. Neighbouring threads have neighbouring channels.
  template <typename Bits, typename Convert>
  __device__ __forceinline__ void store_bits(const DepthwiseParams& p, const DepthwiseBlock& b,
                                             const DepthwiseThread& t, int cell_d, float bias, Convert convert) const {
    const int channel = b.channel + t.lane;
    if (!t.active || channel >= p.channels) return;
    const int w0 = (b.tile[1] * p.plan.groups + t.group) * kColumns * kUp - p.skew[2];
    const int oh0 = (b.tile[0] * p.plan.rows + t.row) * kRows * kUp - p.skew[1];
    Bits* const y = static_cast<Bits*>(p.y) + b.n * p.y_stride_n + channel * p.y_stride_c + w0 * p.y_stride[2];
#pragma unroll
    for (int d = 0; d < kUpDepth; ++d) {
      const int od = cell_d * kUpDepth + d - p.skew[0];
      if (od < 0 || od >= p.out[0]) continue;
#pragma unroll
      for (int r = 0; r < kRows * kUp; ++r) {
        if (oh0 + r < 0 || oh0 + r >= p.out[1]) continue;
        Bits* to = y + od * p.y_stride[0] + (oh0 + r) * p.y_stride[1];
#pragma unroll
        for (int c = 0; c < kColumns * kUp; ++c) {
          if (w0 + c >= 0 && w0 + c < p.out[2]) *to = convert(sums[kOpen - 1][d][r][c] + bias);
          to += p.y_stride[2];
        }
      }
    }
  }
  __device__ __forceinline__ void store(const DepthwiseParams& p, const DepthwiseBlock& b, const DepthwiseThread& t,
                                        int cell_d, float bias) const {
    if (p.dtype == Dtype::kFloat32) {
      store_bits<float>(p, b, t, cell_d, bias, [](float v) { return v; });
    } else {
      const bool is_bfloat16 = p.dtype == Dtype::kBFloat16;
      store_bits<uint16_t>(p, b, t, cell_d, bias, [=](float v) {
        return is_bfloat16 ? __bfloat16_as_ushort(from_acc<__nv_bfloat16>(v)) : __half_as_ushort(from_acc<__half>(v));
      });
    }
  }

  // Contiguous tensors at stride 1 whose rows are whole pieces: a thread's columns are one piece or two.
  __device__ __forceinline__ void store_pieces(const DepthwiseParams& p, const DepthwiseBlock& b,
                                               const DepthwiseThread& t, int cell_d, float bias) const {
    static_assert(!kDirect || kColumns * kUp == 8, "");
    const int channel = b.channel + t.plane;
    const int w = (b.tile[1] * p.plan.groups + t.group) * kColumns;
    if (!t.active || channel >= p.channels || w >= p.out[2]) return;
    const int oh0 = (b.tile[0] * p.plan.rows + t.row) * kRows;
    int64_t at = b.n * p.y_stride_n + channel * p.y_stride_c + cell_d * p.y_stride[0] + oh0 * p.y_stride[1] + w;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (oh0 + r >= p.out[1]) return;
      float v[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) v[c] = sums[kOpen - 1][0][r][c] + bias;
      if (p.dtype == Dtype::kBFloat16) {
        store_result(static_cast<__nv_bfloat16*>(p.y) + at, pack<__nv_bfloat16, 8>(v));
      } else if (p.dtype == Dtype::kFloat16) {
        store_result(static_cast<__half*>(p.y) + at, pack<__half, 8>(v));
      } else {
        float* const to = static_cast<float*>(p.y) + at;
        const Vec<float, 4> low{{v[0], v[1], v[2], v[3]}}, high{{v[4], v[5], v[6], v[7]}};
        store_result(to, low);
        if (w + 4 < p.out[2]) store_result(to + 4, high);
      }
      at += p.y_stride[1];
    }
  }

  // Else a thread has less than a sector of memory, or a part of one: sums go to shared memory first, and from there in
  // whole rows.
  __device__ __forceinline__ void stage(const DepthwiseParams& p, const DepthwiseThread& t, float* to,
                                        float bias) const {
    const DepthwiseTile& tile = p.plan.out;
    if (!t.active) return;
#pragma unroll
    for (int d = 0; d < kUpDepth; ++d) {
      float* const plane = to + (d * tile.planes + t.plane) * tile.plane + t.group * kColumns * kUp;
#pragma unroll
      for (int r = 0; r < kRows * kUp; ++r) {
        float* const row = plane + (r * tile.step + t.row) * tile.pitch;
#pragma unroll
        for (int c = 0; c < kColumns * kUp; ++c) row[c] = sums[kOpen - 1][d][r][c] + bias;
      }
    }
  }

  static __device__ __forceinline__ void write(const DepthwiseParams& p, const DepthwiseBlock& b, int cell_d,
                                               const float* from) {
    constexpr int kAlternate = kRows * kUp;
    const DepthwiseTile& tile = p.plan.out;
    const int log2 = p.y_log2;
    const int begin = b.tile[1] * p.plan.groups * kColumns * kUp - p.skew[2];
    const int row0 = b.tile[0] * p.plan.rows * kRows * kUp - p.skew[1];
    const int group_log2 = kDepthwiseRun - log2;
    const int first = begin >> log2, pieces = ((begin + tile.span - 1) >> log2) - first + 1;
    const int items =
        log2 == 0 ? tile.all_rows * tile.span : (((pieces - 1) >> group_log2) + 1) * tile.all_rows << group_log2;
    const int least = max(begin, 0), most = min(begin + tile.span, p.out[2]);
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      int all_row, w;
      if (log2 == 0) {
        all_row = quotient_of(item, tile.by_span);
        w = begin + item - all_row * tile.span;
      } else {
        const int q = item >> group_log2, group = quotient_of(q, tile.by_all_rows);
        all_row = q - group * tile.all_rows;
        w = (first + (group << group_log2) + (item & ((1 << group_log2) - 1))) << log2;
      }
      const int plane = quotient_of(all_row, tile.by_rows), row = all_row - plane * tile.rows;
      const int d = kUpDepth > 1 ? quotient_of(plane, tile.by_planes) : 0,
                channel = b.channel + plane - d * tile.planes;
      const int od = cell_d * kUpDepth + d - p.skew[0], oh = row0 + row;
      if (channel >= p.channels || od < 0 || od >= p.out[0] || oh < 0 || oh >= p.out[1]) continue;
      const float* const values =
          from + plane * tile.plane + ((row % kAlternate) * tile.step + row / kAlternate) * tile.pitch + (w - begin);
      const int64_t offset = b.n * p.y_stride_n + channel * p.y_stride_c + od * p.y_stride[0] + oh * p.y_stride[1];
      write_piece(p, offset, w, least, most, log2, values);
    }
  }
  // Those of a piece's values from column `least` on and below `most`.
  static __device__ __forceinline__ void write_piece(const DepthwiseParams& p, int64_t offset, int w, int least,
                                                     int most, int log2, const float* values) {
    const int count = 1 << log2;
    if (log2 > 0 && w >= least && w + count <= most) {
      const int size = p.dtype == Dtype::kFloat32 ? 4 : 2;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = i < count ? values[i] : 0.f;
      const uint4 raw = pack_words(v, p.dtype);
      char* const to = static_cast<char*>(p.y) + (offset + w) * size;
      switch (size << log2) {
        case 16: store_words(to, raw); break;
        case 8: store_words(to, make_uint2(raw.x, raw.y)); break;
        default: *reinterpret_cast<uint32_t*>(to) = raw.x;
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (w + i >= least && w + i < most) store_as(p.y, offset + (w + i) * p.y_stride[2], p.dtype, values[i]);
    }
  }

  __device__ __forceinline__ void run(const DepthwiseParams& p, unsigned block, float* shared) {
    const DepthwisePlan& plan = p.plan;
    const DepthwiseBlock b = depthwise_block<kLanes>(p, block);
    const DepthwiseThread t = depthwise_thread<kLanes>(threadIdx.x, plan.rows, plan.in.planes, plan.groups);
    float* const weights = shared + plan.smem_weights;
    DepthwisePlace at;
    at.from = static_cast<const char*>(p.x) +
              (b.n * p.x_stride_n + b.channel * p.x_stride_c) * (p.dtype == Dtype::kFloat32 ? 4 : 2);
    at.stride_c = p.x_stride_c;
    at.channels = min(p.channels - b.channel, kLanes > 1 ? kLanes : plan.in.planes);
#pragma unroll
    for (int i = 0; i < 3; ++i) at.stride[i] = p.x_stride[i], at.size[i] = p.in[i];
    at.row = b.tile[0] * plan.rows * kRows * kStride - p.lead[1];
    at.column = b.tile[1] * plan.groups * kColumns * kStride - p.lead[2];
    at.depth = b.first * kDepth - p.lead[0];
    const In in(plan.in, at, p.dtype, p.x_log2);

    const int channel = b.channel + (kLanes > 1 ? t.lane : t.plane);
    float bias = 0.f;
    if (p.bias && t.active && channel < p.channels) bias = load_as<float>(p.bias, channel, p.weight_dtype);
    load_weights(p, b, weights);
    const float* const own_weights = weights + (kLanes > 1 ? t.lane : t.plane * plan.weight_plane);
    const int row_floats = plan.in.pitch * kLanes;
    const int own =
        t.plane * plan.in.plane + t.row * row_floats + (plan.in.slack + t.group * kColumns * kStride) * kLanes + t.lane;

    if constexpr (!kVolume) {
      in.template all<6>(shared, threadIdx.x, blockDim.x);
      __syncthreads();
      clear(0);
      if (t.active) add_rows(shared + own, plan.in.step, row_floats, own_weights);
      if constexpr (kLanes > 1) {
        store(p, b, t, b.first, bias);
      } else {
        if constexpr (kDirect) {
          if (plan.direct) return store_pieces(p, b, t, b.first, bias);
        }
        __syncthreads();
        stage(p, t, shared + plan.smem_out, bias);
        __syncthreads();
        write(p, b, b.first, shared + plan.smem_out);
      }
    } else {
#pragma unroll
      for (int a = 0; a < kOpen; ++a) clear(a);
      const int in_floats = plan.smem_out / 2, out_floats = (plan.smem_weights - plan.smem_out) / 2;
      const int steps = b.end - b.first + kOpen - 1;
      // The first pieces of a thread lie at the same place of every plane: they are located once.
      DepthwisePiece piece[kBatch];
      bool has[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        has[i] = int(threadIdx.x) + i * int(blockDim.x) < in.items;
        if (has[i]) piece[i] = in.locate(int(threadIdx.x) + i * int(blockDim.x));
      }
      float kept[kK][kK][kK];
      at.depth -= kDepth;
      for (int step = -1; step < steps; ++step) {  // the first one only loads
        if (step >= 0) __syncthreads();
        const float* const now = shared + (step & 1) * in_floats;
        float* const next = shared + (1 - (step & 1)) * in_floats;
        if constexpr (kKeepsWeights) {
          if (step == 0) {
#pragma unroll
            for (int i = 0; i < kK * kK; ++i) weight_row(own_weights, i, kept[i / kK][i % kK]);
          }
        }
        const bool reached[2] = {
            step >= 0 && static_cast<unsigned>(at.depth) < static_cast<unsigned>(p.in[0]),
            step >= 0 && kDepth > 1 && static_cast<unsigned>(at.depth + 1) < static_cast<unsigned>(p.in[0])};
        at.depth += kDepth;
        const bool more = step + 1 < steps;
        uint4 raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (more && has[i]) raw[i] = in.load(piece[i]);
        }
        const int done = b.first + step - kOpen;  // the cell that was complete after the step before
        float* const out = shared + plan.smem_out;
        if (kLanes == 1 && !(kDirect && plan.direct) && done >= b.first)
          write(p, b, done, out + ((step - 1) & 1) * out_floats);
        if (t.active) {
          if (reached[0]) add_plane<0>(now + own, plan.in.step, row_floats, own_weights, kept);
          if constexpr (kDepth > 1) {
            if (reached[1]) {
              add_plane<1>(now + own + plan.in.planes * plan.in.plane, plan.in.step, row_floats, own_weights, kept);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (more && has[i]) in.put(next, piece[i], raw[i]);
        }
        if (more) in.template all<kRest>(next, threadIdx.x + kBatch * blockDim.x, blockDim.x);
        if (done + 1 >= b.first) {
          if constexpr (kLanes > 1) {
            store(p, b, t, done + 1, bias);
          } else {
            if constexpr (kDirect) {
              if (plan.direct) store_pieces(p, b, t, done + 1, bias);
            }
            if (!kDirect || !plan.direct) stage(p, t, out + (step & 1) * out_floats, bias);
          }
        }
        if (step >= 0) advance();
      }
      if constexpr (kLanes == 1) {
        if (kDirect && plan.direct) return;
        __syncthreads();
        write(p, b, b.end - 1, shared + plan.smem_out + ((steps - 1) & 1) * out_floats);
      }
    }
  }
};

template <int kLanes, DepthwiseMode kMode, int kK, bool kVolume>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    conv_depthwise_kernel(const __grid_constant__ DepthwiseParams p) {
  extern __shared__ __align__(16) float depthwise_shared[];
  let_dependents_start();  // another phase, which touches nothing that this one writes
  DepthwiseKernel<kLanes, kMode, kK, kVolume> kernel;
  kernel.run(p, blockIdx.x, depthwise_shared);
  wait_for_prerequisites();  // the phases ahead have ended when this one has
}

}  // namespace kgopt
