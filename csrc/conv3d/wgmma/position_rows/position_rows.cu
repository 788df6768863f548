// Launch of the convolution with positions as rows, its weight packing and its tensor map.
#include "conv3d/wgmma/position_rows/position_rows.h"

#include <algorithm>

#include "common/device/dependent_launch.cuh"
#include "common/device/mma.cuh"
#include "common/host/tensor_map.h"
#include "conv3d/wgmma/pack.cuh"
#include "conv3d/wgmma/position_rows/kernel.cuh"

namespace kgopt {
namespace {

constexpr const char* kName = "conv_position_rows_kernel";

// One 16-byte piece of an image a thread.
__global__ void __launch_bounds__(128)
    conv_position_rows_pack_kernel(const __grid_constant__ PositionRowsPackParams p) {
  let_dependents_start();
  const PositionRowsPlan& plan = p.plan;
  const bool half = plan.math == ConvMath::kBf16 || plan.math == ConvMath::kFp16;
  const int per_piece = half ? 8 : 4, pieces_per_row = plan.row_bytes / 16, rows = plan.segments * 64;
  const int64_t pieces = plan.packed_bytes / 16;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  pack_bias(p, int64_t(plan.m_tiles) * rows);
  for (int64_t index = first; index < pieces; index += step) {
    PackedIndex at{static_cast<uint32_t>(index)};
    const int piece = at.next(pieces_per_row), row = at.next(rows);
    int kw = at.next(plan.taps[2]), kh = at.next(plan.taps[1]);
    const int chunk = at.next(plan.chunks);
    int kd = at.next(plan.taps[0]);
    const int co = static_cast<int>(at.rest) * rows + position_rows_channel(row);
    // With two parts: high, low, high, by high, high, low of x.
    const int part_chunks = plan.parts == 2 ? plan.chunks / 3 : plan.chunks, product = chunk / part_chunks;
    const int ci = ((chunk - product * part_chunks) * pieces_per_row + piece) * per_piece;
    if (plan.flip) {
      kd = plan.taps[0] - 1 - kd;
      kh = plan.taps[1] - 1 - kh;
      kw = plan.taps[2] - 1 - kw;
    }
    const int64_t from =
        co * p.stride_out + ci * p.stride_in + kd * p.stride_k[0] + kh * p.stride_k[1] + kw * p.stride_k[2];
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= per_piece || ci + i >= p.c_in || co >= p.c_out) continue;
      if (half) {
        words[i / 2] |= half_bits(p, from + i * p.stride_in) << i % 2 * 16;
      } else {
        const float v = static_cast<const float*>(p.weight)[from + i * p.stride_in];
        uint32_t hi = to_tf32(v), lo;
        if (plan.parts == 2) split_tf32(v, &hi, &lo);
        words[i % 4] = product == 1 ? lo : hi;
      }
    }
    const int swizzled = piece ^ (row * plan.row_bytes / 128 & (pieces_per_row - 1));
    static_cast<uint4*>(p.packed)[index - piece + swizzled] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Four channels a thread.
__global__ void __launch_bounds__(256)
    conv_position_rows_split_kernel(const __grid_constant__ PositionRowsSplitParams p) {
  const int channels = position_rows_part_channels(p.plan), pieces = channels / 4;
  const int64_t plane = int64_t(p.in[1]) * p.in[2], all = p.n * p.in[0] * plane * pieces;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < all;
       index += int64_t(gridDim.x) * blockDim.x) {
    const int64_t position = index / pieces, depth = position / plane;
    const int c = static_cast<int>(index - position * pieces) * 4;
    const int64_t n = depth / p.in[0];
    const float* const from = static_cast<const float*>(p.x) + n * p.stride_n + (depth - n * p.in[0]) * p.stride_d +
                              (position - depth * plane) * p.stride_w + c;
    const float4 v = c < p.c_in ? *reinterpret_cast<const float4*>(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    uint4 hi, lo;
    split_tf32(v.x, &hi.x, &lo.x);
    split_tf32(v.y, &hi.y, &lo.y);
    split_tf32(v.z, &hi.z, &lo.z);
    split_tf32(v.w, &hi.w, &lo.w);
    uint4* const to = static_cast<uint4*>(p.copy) + position * 2 * pieces + c / 4;
    to[0] = hi;
    to[pieces] = lo;
  }
}

// The blocks may start while the packing still runs; they wait for it before they read weights.
template <auto kKernel>
Status launch_after_pack(const PositionRowsParams& p, cudaStream_t stream) {
  return launch_after<kKernel>(true, kName, dim3(p.plan.blocks), kWgmmaThreads, p.plan.smem_bytes, stream, p);
}

template <ConvMath kMath, int kN, bool kNormalizes>
Status launch_row_bytes(const PositionRowsParams& p, cudaStream_t stream) {
  return p.plan.row_bytes == 64 ? launch_after_pack<conv_position_rows_kernel<kMath, kN, 64, kNormalizes>>(p, stream)
                                : launch_after_pack<conv_position_rows_kernel<kMath, kN, 128, kNormalizes>>(p, stream);
}

template <ConvMath kMath, bool kNormalizes>
Status launch_tile(const PositionRowsParams& p, cudaStream_t stream) {
  return p.plan.columns == 256 ? launch_row_bytes<kMath, 256, kNormalizes>(p, stream)
                               : launch_row_bytes<kMath, 208, kNormalizes>(p, stream);
}

template <ConvMath kMath>
Status launch_math(const PositionRowsParams& p, cudaStream_t stream) {
  return p.plan.normalizes ? launch_tile<kMath, true>(p, stream) : launch_tile<kMath, false>(p, stream);
}

}  // namespace

Status run_conv_position_rows_pack(const PositionRowsPackParams& p, cudaStream_t stream) {
  const int64_t pieces = p.plan.packed_bytes / 16;
  const int blocks = static_cast<int>(std::min<int64_t>((pieces + 127) / 128, 2048));
  return launch_kernel<conv_position_rows_pack_kernel>("conv_position_rows_pack_kernel", p, blocks, 128, 0, stream);
}

Status run_conv_position_rows_split(const PositionRowsSplitParams& p, cudaStream_t stream) {
  const int64_t pieces = p.plan.copy_bytes / 32;
  if (pieces == 0) return Status::Ok();
  const int blocks = static_cast<int>(std::min<int64_t>((pieces + 255) / 256, 1 << 16));
  return launch_kernel<conv_position_rows_split_kernel>("conv_position_rows_split_kernel", p, blocks, 256, 0, stream);
}

Status set_position_rows_input(PositionRowsParams* p, const void* x, int64_t n, int64_t c_in,
                               const int64_t (&strides)[4]) {
  const PositionRowsPlan& plan = p->plan;
  const bool fp32 = plan.math == ConvMath::kTf32 || plan.math == ConvMath::kTf32x3;
  const cuuint64_t size = fp32 ? 4 : 2;
  TensorMapSpec map{};
  map.type = fp32                           ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
             : plan.math == ConvMath::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  map.rank = 5;
  map.data = x;
  const cuuint64_t sizes[5] = {cuuint64_t(c_in), cuuint64_t(p->in[2]), cuuint64_t(p->in[1]), cuuint64_t(p->in[0]),
                               cuuint64_t(n)};
  std::copy(sizes, sizes + 5, map.sizes);
  // A dim of size 1 may have any stride, which the map would refuse.
  cuuint64_t dense = c_in * size;
  for (int i = 0; i < 4; ++i) {
    map.strides[i] = sizes[i + 1] == 1 ? dense : strides[i] * size;
    dense = map.strides[i] * sizes[i + 1];
  }
  const cuuint32_t box[5] = {cuuint32_t(plan.row_bytes / size), cuuint32_t(plan.row_slots), 1, 1, 1};
  std::copy(box, box + 5, map.box);
  map.swizzle = plan.row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode_tensor_map(kName, map, p->x_map);
}

Status run_conv_position_rows(const PositionRowsParams& p, cudaStream_t stream) {
  if (p.plan.tiles == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_math<ConvMath::kTf32>(p, stream);
    case ConvMath::kTf32x3: return launch_row_bytes<ConvMath::kTf32x3, 128, false>(p, stream);
    case ConvMath::kBf16: return launch_math<ConvMath::kBf16>(p, stream);
    default: return launch_math<ConvMath::kFp16>(p, stream);
  }
}

}  // namespace kgopt
