// Launches of the transposed convolution with its norm, the packing of its weights and the copy of its input.
#include "conv3d/wgmma/transposed_norm/transposed_norm.h"

#include "common/device/dependent_launch.cuh"
#include "common/device/mma.cuh"
#include "common/host/launch.h"
#include "common/host/tensor_map.h"
#include "conv3d/norm_conv/scaled_half.cuh"
#include "conv3d/norm_conv/scaled_half.h"
#include "conv3d/wgmma/pack.cuh"
#include "conv3d/wgmma/transposed_norm/kernel.cuh"

namespace kgopt {
namespace {

// One 16-byte piece of an image a thread, of which this is number `first` of `step`.
__device__ __forceinline__ void pack_transposed_norm(const TransposedNormPackParams& p, const TransposedNormPlan& plan,
                                                     int64_t first, int64_t step) {
  const bool half = p.dtype != Dtype::kFloat32;
  const int per_piece = half ? 8 : 4;
  const int64_t pieces = plan.packed_bytes / 16;
  for (int64_t i = first; i < p.n; i += step) p.arrived[i] = 0;
  pack_bias(p, int64_t(plan.m_tiles) * kTransposedNormChannels, p.bias_dtype);
  for (int64_t index = first; index < pieces; index += step) {
    PackedIndex at{static_cast<uint32_t>(index)};
    const int piece = at.next(kTransposedNormRowBytes / 16), row = at.next(kTransposedNormChannels),
              part = at.next(plan.parts);
    int kw = at.next(plan.taps[2]), kh = at.next(plan.taps[1]);
    const int chunk = at.next(plan.chunks);
    int kd = at.next(plan.taps[0]);
    const int co = static_cast<int>(at.rest) * kTransposedNormChannels + row;
    const int ci = (chunk * (kTransposedNormRowBytes / 16) + piece) * per_piece;
    if (plan.flip) {
      kd = plan.taps[0] - 1 - kd;
      kh = plan.taps[1] - 1 - kh;
      kw = plan.taps[2] - 1 - kw;
    }
    const int64_t from =
        co * p.stride_out + ci * p.stride_in + kd * p.stride_k[0] + kh * p.stride_k[1] + kw * p.stride_k[2];
    uint32_t words[4] = {};
    for (int i = 0; i < per_piece; ++i) {
      if (ci + i >= p.c_in || co >= p.c_out) continue;
      if (half) {
        words[i / 2] |= uint32_t(static_cast<const unsigned short*>(p.weight)[from + i * p.stride_in]) << i % 2 * 16;
      } else {
        const float v = static_cast<const float*>(p.weight)[from + i * p.stride_in];
        uint32_t hi = to_tf32(v), lo;
        if (plan.parts == 2) split_tf32(v, &hi, &lo);
        words[i] = part == 0 ? hi : lo;
      }
    }
    static_cast<uint4*>(p.packed)[index - piece + (piece ^ (row & 7))] =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__global__ void __launch_bounds__(128)
    conv_transposed_norm_pack_kernel(const __grid_constant__ TransposedNormPackParams p) {
  pack_transposed_norm(p, p.plan, int64_t(blockIdx.x) * blockDim.x + threadIdx.x, int64_t(gridDim.x) * blockDim.x);
  wait_for_prerequisites();  // the kernel behind this one wants the copy of x, too
}

constexpr int kInputThreads = 128;
constexpr int kInputSlots = 64;  // of a tile, by one chunk of channels

// The tile lies in shared memory as [word of the chunk][slot]. kPairs: half types whose rows of x are whole words.
// kScaled: of fp32 x, fp16 times the channels' scales.
template <bool kHalf, int kParts, bool kPairs, bool kScaled = false>
__global__ void __launch_bounds__(kInputThreads)
    conv_transposed_norm_input_kernel(const __grid_constant__ TransposedNormInputParams p) {
  constexpr int kWords = kTransposedNormRowBytes / 4, kPerWarp = kWords / (kInputThreads / 32);
  __shared__ uint32_t tile[kParts][kWords][kInputSlots + 1];
  let_dependents_start();  // the packing
  const TransposedNormPlan& plan = p.plan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t slot0 = int64_t(blockIdx.x) * kInputSlots;
  const int chunk = blockIdx.y, n = p.n - 1 - blockIdx.z;  // the first samples last: the convolution finds them in L2
  const int word0 = warp * kPerWarp;
  auto place = [&](int slot, int64_t* from) {  // of a slot in x; false: zeros
    const int d = plan.by_plane(slot), in_plane = slot - d * plan.plane;
    const int h = in_plane / plan.out[2], w = in_plane - h * plan.out[2];
    *from = n * p.stride_n + d * p.stride[0] + h * p.stride[1] + w * p.stride[2];
    return slot < plan.slots && h < plan.in[1] && w < plan.in[2];
  };
  if constexpr (kPairs) {
    int64_t from;
    const bool inside = place(static_cast<int>(slot0) + lane * 2, &from);
    uint32_t words[kPerWarp][2];
#pragma unroll
    for (int j = 0; j < kPerWarp; ++j) {
      const int c = (chunk * kWords + word0 + j) * 2;
      const unsigned short* const x = static_cast<const unsigned short*>(p.x) + from + c * p.stride_c;
      words[j][0] = inside && c < p.c_in ? *reinterpret_cast<const uint32_t*>(x) : 0;
      words[j][1] = inside && c + 1 < p.c_in ? *reinterpret_cast<const uint32_t*>(x + p.stride_c) : 0;
    }
#pragma unroll
    for (int j = 0; j < kPerWarp; ++j) {
      tile[0][word0 + j][lane * 2] = __byte_perm(words[j][0], words[j][1], 0x5410);
      tile[0][word0 + j][lane * 2 + 1] = __byte_perm(words[j][0], words[j][1], 0x7632);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kInputSlots / 32; ++i) {
      int64_t from;
      const bool inside = place(static_cast<int>(slot0) + i * 32 + lane, &from);
#pragma unroll
      for (int j = 0; j < kPerWarp; ++j) {
        const int word = word0 + j;
        if constexpr (kScaled) {
          const int c = (chunk * kWords + word) * 2;
          const float* const x = static_cast<const float*>(p.x) + from + c * p.stride_c;
          const float v0 = inside && c < p.c_in ? x[0] * scaled_input_scale(__ldg(p.largest + c)) : 0.f;
          const float v1 =
              inside && c + 1 < p.c_in ? x[p.stride_c] * scaled_input_scale(__ldg(p.largest + c + 1)) : 0.f;
          const __half2 both = __floats2half2_rn(v0, v1);
          tile[0][word][i * 32 + lane] = reinterpret_cast<const uint32_t&>(both);
        } else if constexpr (kHalf) {
          const int c = (chunk * kWords + word) * 2;
          const unsigned short* const x = static_cast<const unsigned short*>(p.x) + from + c * p.stride_c;
          uint32_t v = inside && c < p.c_in ? x[0] : 0;
          v |= inside && c + 1 < p.c_in ? uint32_t(x[p.stride_c]) << 16 : 0;
          tile[0][word][i * 32 + lane] = v;
        } else {
          const int c = chunk * kWords + word;
          const float v = inside && c < p.c_in ? static_cast<const float*>(p.x)[from + c * p.stride_c] : 0.f;
          if constexpr (kParts == 2) {
            split_tf32(v, &tile[0][word][i * 32 + lane], &tile[kParts - 1][word][i * 32 + lane]);
          } else {
            tile[0][word][i * 32 + lane] = to_tf32(v);
          }
        }
      }
    }
  }
  __syncthreads();
  const bool tail = n >= p.x_split;
  char* const copy = static_cast<char*>(tail ? p.tail_copy : p.copy) + (n - (tail ? p.x_split : 0)) * plan.sample_bytes;
  const int piece = threadIdx.x % (kTransposedNormRowBytes / 16);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kInputSlots; i += kInputThreads / (kTransposedNormRowBytes / 16)) {
      const int s = i + threadIdx.x / (kTransposedNormRowBytes / 16);
      if (slot0 + s < plan.slots) {
        const uint4 v = make_uint4(tile[part][piece * 4][s], tile[part][piece * 4 + 1][s], tile[part][piece * 4 + 2][s],
                                   tile[part][piece * 4 + 3][s]);
        char* const to =
            copy + ((slot0 + s) * kParts * plan.chunks + part * plan.chunks + chunk) * kTransposedNormRowBytes;
        reinterpret_cast<uint4*>(to)[piece] = v;
      }
    }
  }
}

// Half types whose rows of x are whole vectors: the tile lies in shared memory as x does, [channel][vector], and comes
// out of it transposed. Vectors of a channel are in an order of its own, such that every bank is met once.
constexpr int kTransposeThreads = 256;
constexpr int kTransposeVectors = 32;   // of a tile, 8 positions each
constexpr int kTransposeChannels = 64;  // a chunk

// The first layers of blocks pack the weights instead.
__global__ void __launch_bounds__(kTransposeThreads)
    conv_transposed_norm_transpose_kernel(const __grid_constant__ TransposedNormInputParams p,
                                          const __grid_constant__ TransposedNormPackParams pack) {
  constexpr int kWarps = kTransposeThreads / 32;
  __shared__ uint4 tile[kTransposeChannels][kTransposeVectors];
  const TransposedNormPlan& plan = p.plan;
  const int layers = gridDim.z - p.n, layer = blockIdx.z;
  if (layer < layers) {
    const int64_t of_layer = int64_t(gridDim.x) * gridDim.y;
    const int64_t block = layer * of_layer + blockIdx.y * gridDim.x + blockIdx.x;
    pack_transposed_norm(pack, plan, block * kTransposeThreads + threadIdx.x, layers * of_layer * kTransposeThreads);
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The first samples last: the convolution finds them in L2.
  const int chunk = blockIdx.y, n = p.n - 1 - (layer - layers);
  const int row_vectors = plan.in[2] / 8, vectors = plan.in[0] * plan.in[1] * row_vectors;
  const int vector0 = blockIdx.x * kTransposeVectors;

  // This lane's vector: where it lies in x, and its first slot.
  const int row = (vector0 + lane) / row_vectors, w = ((vector0 + lane) - row * row_vectors) * 8;
  const int d = row / plan.in[1], h = row - d * plan.in[1];
  const int own_slot = (d * plan.out[1] + h) * plan.out[2] + w;
  const bool ends_row = w + 8 == plan.in[2], ends_plane = ends_row && h + 1 == plan.in[1];
  const int own_zeros = ends_plane ? (plan.out[1] - h) * plan.out[2] - plan.in[2]
                        : ends_row ? plan.out[2] - plan.in[2]
                                   : 0;  // slots behind it
  const unsigned short* const x = static_cast<const unsigned short*>(p.x) + n * p.stride_n + d * p.stride[0] +
                                  h * p.stride[1] + w + int64_t(chunk) * kTransposeChannels * p.stride_c;
  const int channels = p.c_in - chunk * kTransposeChannels;
#pragma unroll
  for (int j = 0; j < kTransposeChannels / kWarps; ++j) {
    const int c = j * kWarps + warp;
    const bool inside = vector0 + lane < vectors && c < channels;
    cp_async_16_stream(&tile[c][lane ^ (c / 8 % 4 * 2 + c % 2)], inside ? x + c * p.stride_c : p.x, inside);
  }
  cp_async_wait_all();
  __syncthreads();

  const bool tail = n >= p.x_split;
  char* const copy = static_cast<char*>(tail ? p.tail_copy : p.copy) +
                     (n - (tail ? p.x_split : 0)) * plan.sample_bytes + int64_t(chunk) * kTransposedNormRowBytes;
  const int64_t slot_bytes = int64_t(plan.chunks) * kTransposedNormRowBytes;
  // Of four matrices of 8 channels, this lane names the channel that thread t finds at word m, for t and m of
  // 8 t + 2 m + r % 2: each thread then holds eight neighbouring channels of one position.
  const int r = lane % 8, channel = r / 2 * 8 + lane / 8 * 2 + r % 2;
#pragma unroll
  for (int j = 0; j < kTransposeVectors / kWarps; ++j) {
    const int vector = j * kWarps + warp;
    const int slot = __shfl_sync(0xffffffff, own_slot, vector), zeros = __shfl_sync(0xffffffff, own_zeros, vector);
    if (vector0 + vector >= vectors) break;
    char* const to = copy + slot * slot_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v[4];
      load_matrices_transposed(v, shared_address(&tile[half * 32 + channel][vector ^ r]));
      *reinterpret_cast<uint4*>(to + lane / 4 * slot_bytes + half * 64 + lane % 4 * 16) =
          make_uint4(v[0], v[1], v[2], v[3]);
    }
    for (int i = lane; i < zeros * (kTransposedNormRowBytes / 16); i += 32) {
      *reinterpret_cast<uint4*>(to + (8 + i / 8) * slot_bytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
}

template <auto kKernel>
Status launch_input(const TransposedNormInputParams& p, dim3 grid, cudaStream_t stream) {
  return launch_kernel<kKernel>("conv_transposed_norm_input_kernel", p, grid, kInputThreads, 0, stream);
}

template <auto kKernel>
Status launch_cooperative(const TransposedNormParams& p, cudaStream_t stream) {
  const char* const name = "conv_transposed_norm_kernel";
  cudaError_t error = allow_dynamic_smem<kKernel>(p.plan.smem_bytes);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;  // blocks wait for each other's samples
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(p.plan.blocks);
    config.blockDim = dim3(kWgmmaThreads);
    config.dynamicSmemBytes = p.plan.smem_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, kKernel, p);
  }
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // answered by the caller
    return Status::Unsupported(name, "this process may use fewer multiprocessors than the GPU has");
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

template <ConvMath kMath>
Status launch_columns(const TransposedNormParams& p, cudaStream_t stream) {
  if constexpr (kMath == ConvMath::kTf32x3) {
    return launch_cooperative<conv_transposed_norm_kernel<kMath, 96, false>>(p, stream);
  } else {
    if constexpr (kMath == ConvMath::kFp16) {
      if (p.plan.scaled && p.plan.columns == 184) {
        return launch_cooperative<conv_transposed_norm_kernel<kMath, 184, true>>(p, stream);
      }
      if (p.plan.scaled) return launch_cooperative<conv_transposed_norm_kernel<kMath, 128, true>>(p, stream);
    }
    if (p.plan.columns == 184) return launch_cooperative<conv_transposed_norm_kernel<kMath, 184, false>>(p, stream);
    return launch_cooperative<conv_transposed_norm_kernel<kMath, 128, false>>(p, stream);
  }
}

Status run_conv_transposed_norm_pack(const TransposedNormPackParams& p, bool early, cudaStream_t stream) {
  const int64_t pieces = p.plan.packed_bytes / 16;
  const int blocks = static_cast<int>(std::min<int64_t>((pieces + 127) / 128, 2048));
  // Early: beside the end of the copy, which it does not depend on. It takes longer to start than to run.
  return launch_after<conv_transposed_norm_pack_kernel>(early, "conv_transposed_norm_pack_kernel", blocks, 128, stream,
                                                        p);
}

Status run_conv_transposed_norm_input(const TransposedNormInputParams& p, cudaStream_t stream) {
  const char* const name = "conv_transposed_norm_input_kernel";
  const TransposedNormPlan& plan = p.plan;
  const int64_t tiles = (plan.slots + kInputSlots - 1) / kInputSlots;
  if (tiles * p.n == 0) return Status::Ok();
  if (p.n > kTransposedNormMostBatch) return Status::Unsupported(name, "more samples than a grid has layers");
  const dim3 grid(static_cast<unsigned>(tiles), plan.chunks, p.n);
  if (p.dtype != Dtype::kFloat32) {
    const bool pairs = reinterpret_cast<uintptr_t>(p.x) % 4 == 0 && p.stride[2] == 1 && p.stride[1] % 2 == 0 &&
                       p.stride[0] % 2 == 0 && p.stride_c % 2 == 0 && p.stride_n % 2 == 0 && plan.in[2] % 2 == 0 &&
                       plan.out[2] % 2 == 0 && plan.plane % 2 == 0;
    if (pairs) return launch_input<conv_transposed_norm_input_kernel<true, 1, true>>(p, grid, stream);
    return launch_input<conv_transposed_norm_input_kernel<true, 1, false>>(p, grid, stream);
  }
  if (plan.scaled) {
    return launch_input<conv_transposed_norm_input_kernel<false, 1, false, true>>(p, grid, stream);
  }
  if (plan.parts == 1) {
    return launch_input<conv_transposed_norm_input_kernel<false, 1, false>>(p, grid, stream);
  }
  return launch_input<conv_transposed_norm_input_kernel<false, 2, false>>(p, grid, stream);
}

}  // namespace

Status run_conv_transposed_norm_prepare(const TransposedNormInputParams& p, const TransposedNormPackParams& pack,
                                        const ScaledHalfParams* scaled, cudaStream_t stream) {
  const TransposedNormPlan& plan = p.plan;
  const bool vectors = p.dtype != Dtype::kFloat32 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.stride[2] == 1 &&
                       p.stride[1] % 8 == 0 && p.stride[0] % 8 == 0 && p.stride_c % 8 == 0 && p.stride_n % 8 == 0 &&
                       plan.in[2] % 8 == 0 && p.n > 0;
  if (vectors) {
    const int64_t all = int64_t(plan.in[0]) * plan.in[1] * (plan.in[2] / 8);
    const int64_t tiles = (all + kTransposeVectors - 1) / kTransposeVectors;
    const int64_t pieces = plan.packed_bytes / 16, of_layer = tiles * plan.chunks * kTransposeThreads;
    const int64_t layers = std::min<int64_t>((pieces + of_layer - 1) / of_layer, kTransposedNormPackLayers);
    const dim3 blocks(static_cast<unsigned>(tiles), plan.chunks, static_cast<unsigned>(layers + p.n));
    return launch_after<conv_transposed_norm_transpose_kernel>(false, "conv_transposed_norm_transpose_kernel", blocks,
                                                               kTransposeThreads, 0, stream, p, pack);
  }
  Status status = run_conv_transposed_norm_input(p, stream);
  if (status.ok() && scaled) status = run_scaled_weights(*scaled, true, stream);
  return status.ok() ? run_conv_transposed_norm_pack(pack, !scaled, stream) : status;
}

Status set_transposed_norm_input(TransposedNormParams* p, const void* copy, const void* tail_copy) {
  const TransposedNormPlan& plan = p->plan;
  const bool half = plan.math == ConvMath::kBf16 || plan.math == ConvMath::kFp16;
  const cuuint64_t row_bytes = cuuint64_t(kTransposedNormRowBytes) * plan.chunks * plan.parts;
  TensorMapSpec map{};
  map.type = plan.math == ConvMath::kBf16   ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
             : plan.math == ConvMath::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  map.rank = 3;
  map.sizes[0] = row_bytes / (half ? 2 : 4);
  map.sizes[1] = plan.slots;
  map.strides[0] = row_bytes;
  map.strides[1] = plan.sample_bytes;
  map.box[0] = kTransposedNormRowBytes / (half ? 2 : 4);
  map.box[1] = plan.box_rows;
  map.box[2] = 1;
  map.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  for (const bool tail : {false, true}) {
    map.data = tail ? tail_copy : copy;
    map.sizes[2] = tail ? p->n - p->x_split : p->x_split;
    if (map.sizes[2] == 0) continue;
    const Status status = encode_tensor_map("conv_transposed_norm_kernel", map, tail ? p->x_tail_map : p->x_map);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status run_conv_transposed_norm(const TransposedNormParams& p, cudaStream_t stream) {
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_columns<ConvMath::kTf32>(p, stream);
    case ConvMath::kTf32x3: return launch_columns<ConvMath::kTf32x3>(p, stream);
    case ConvMath::kBf16: return launch_columns<ConvMath::kBf16>(p, stream);
    default: return launch_columns<ConvMath::kFp16>(p, stream);
  }
}

}  // namespace kgopt
