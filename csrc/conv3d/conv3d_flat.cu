// Launches of the flat convolution, the packing of its weights and the copy of its input.
#include "conv3d_flat.h"

#include "../common/dependent_launch.cuh"
#include "../common/launch.h"
#include "../common/mma.cuh"
#include "../common/tensor_map.h"
#include "conv3d_flat_copy.cuh"
#include "conv3d_flat_kernel.cuh"

namespace kgopt {
namespace {

// One 16-byte piece of an image a thread.
__global__ void __launch_bounds__(128) conv_flat_pack_kernel(const __grid_constant__ FlatPackParams p) {
  const FlatPlan& plan = p.plan;
  const bool half = p.dtype != Dtype::kFloat32;
  const int per_piece = half ? 8 : 4;
  const int64_t pieces = plan.packed_bytes / 16;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < 2 * p.n; i += step) p.counters[i] = 0;
  for (int64_t c = first; c < int64_t(plan.m_tiles) * kFlatChannels; c += step) {
    p.packed_bias[c] = p.bias && c < p.c_out ? load_as<float>(p.bias, c, p.dtype) : 0.f;
  }
  for (int64_t index = first; index < pieces; index += step) {
    uint32_t rest = static_cast<uint32_t>(index);
    auto next = [&](uint32_t size) {
      const uint32_t digit = rest % size;
      rest /= size;
      return static_cast<int>(digit);
    };
    const int piece = next(kFlatRowBytes / 16), row = next(kFlatChannels), part = next(plan.parts);
    int kw = next(plan.taps[2]), kh = next(plan.taps[1]);
    const int chunk = next(plan.chunks);
    int kd = next(plan.taps[0]);
    const int co = static_cast<int>(rest) * kFlatChannels + row;
    const int ci = (chunk * (kFlatRowBytes / 16) + piece) * per_piece;
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
        uint32_t hi, lo;
        split_tf32(static_cast<const float*>(p.weight)[from + i * p.stride_in], &hi, &lo);
        words[i] = part == 0 ? hi : lo;
      }
    }
    static_cast<uint4*>(p.packed)[index - piece + (piece ^ (row & 7))] =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  wait_for_prerequisites();  // the kernel behind this one wants the copy of x, too
}

constexpr int kInputThreads = 128;
constexpr int kInputSlots = 64;  // of a tile, by one chunk of channels

// The tile lies in shared memory as [word of the chunk][slot]. kPairs: half types whose rows of x are whole words.
template <bool kHalf, int kParts, bool kPairs>
__global__ void __launch_bounds__(kInputThreads) conv_flat_input_kernel(const __grid_constant__ FlatInputParams p) {
  constexpr int kWords = kFlatRowBytes / 4, kPerWarp = kWords / (kInputThreads / 32);
  __shared__ uint32_t tile[kParts][kWords][kInputSlots + 1];
  let_dependents_start();  // the packing
  const FlatPlan& plan = p.plan;
  const FlatInput& in = p.input;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t slot0 = int64_t(blockIdx.x) * kInputSlots;
  const int chunk = blockIdx.y, n = p.n - 1 - blockIdx.z;  // the first samples last: the convolution finds them in L2
  const int word0 = warp * kPerWarp;
  auto place = [&](int slot, int64_t* from) {  // of a slot in x; false: zeros
    const int d = plan.by_plane(slot), in_plane = slot - d * plan.plane;
    const int h = in_plane / plan.out[2], w = in_plane - h * plan.out[2];
    *from = n * in.stride_n + d * in.stride[0] + h * in.stride[1] + w * in.stride[2];
    return slot < plan.slots && h < plan.in[1] && w < plan.in[2];
  };
  if constexpr (kPairs) {
    int64_t from;
    const bool inside = place(static_cast<int>(slot0) + lane * 2, &from);
    uint32_t words[kPerWarp][2];
#pragma unroll
    for (int j = 0; j < kPerWarp; ++j) {
      const int c = (chunk * kWords + word0 + j) * 2;
      const unsigned short* const x = static_cast<const unsigned short*>(in.x) + from + c * in.stride_c;
      words[j][0] = inside && c < in.c_in ? *reinterpret_cast<const uint32_t*>(x) : 0;
      words[j][1] = inside && c + 1 < in.c_in ? *reinterpret_cast<const uint32_t*>(x + in.stride_c) : 0;
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
        if constexpr (kHalf) {
          const int c = (chunk * kWords + word) * 2;
          const unsigned short* const x = static_cast<const unsigned short*>(in.x) + from + c * in.stride_c;
          uint32_t v = inside && c < in.c_in ? x[0] : 0;
          v |= inside && c + 1 < in.c_in ? uint32_t(x[in.stride_c]) << 16 : 0;
          tile[0][word][i * 32 + lane] = v;
        } else {
          const int c = chunk * kWords + word;
          const float v = inside && c < in.c_in ? static_cast<const float*>(in.x)[from + c * in.stride_c] : 0.f;
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
  const bool tail = n >= in.x_split;
  char* const copy =
      static_cast<char*>(tail ? in.tail_copy : in.copy) + (n - (tail ? in.x_split : 0)) * plan.sample_bytes;
  const int piece = threadIdx.x % (kFlatRowBytes / 16);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kInputSlots; i += kInputThreads / (kFlatRowBytes / 16)) {
      const int s = i + threadIdx.x / (kFlatRowBytes / 16);
      if (slot0 + s < plan.slots) {
        const uint4 v = make_uint4(tile[part][piece * 4][s], tile[part][piece * 4 + 1][s], tile[part][piece * 4 + 2][s],
                                   tile[part][piece * 4 + 3][s]);
        char* const to = copy + ((slot0 + s) * kParts * plan.chunks + part * plan.chunks + chunk) * kFlatRowBytes;
        reinterpret_cast<uint4*>(to)[piece] = v;
      }
    }
  }
}

constexpr int kPieceThreads = 256;

// A piece a warp, see conv3d_flat_copy.cuh.
__global__ void __launch_bounds__(kPieceThreads) conv_flat_transpose_kernel(const __grid_constant__ FlatInputParams p) {
  __shared__ __align__(128) char tiles[kPieceThreads / 32][kFlatCopyBytes];
  let_dependents_start();  // the packing
  char* const tile = tiles[threadIdx.x / 32];
  const int n = p.n - 1 - blockIdx.z;  // the first samples last: the convolution finds them in L2
  const int first = (blockIdx.x * (kPieceThreads / 32) + threadIdx.x / 32) * kFlatCopyVectors;
  load_flat_piece(p.input, p.plan, n, blockIdx.y, first, tile, threadIdx.x % 32);
  cp_async_wait_all();
  __syncwarp();
  store_flat_piece(p.input, p.plan, n, blockIdx.y, first, tile, threadIdx.x % 32);
}

template <auto kKernel>
Status launch_input(const FlatInputParams& p, dim3 grid, cudaStream_t stream) {
  return launch_kernel<kKernel>("conv_flat_input_kernel", p, grid, kInputThreads, 0, stream);
}

template <auto kKernel>
Status launch_cooperative(const FlatParams& p, cudaStream_t stream) {
  const char* const name = "conv_flat_kernel";
  cudaError_t error = allow_dynamic_smem<kKernel>(p.plan.smem_bytes);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;  // blocks wait for each other's samples
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(p.plan.blocks);
    config.blockDim = dim3(kHopperThreads);
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
Status launch_columns(const FlatParams& p, cudaStream_t stream) {
  if constexpr (kMath == ConvMath::kTf32x3) {
    return launch_cooperative<conv_flat_kernel<kMath, 96>>(p, stream);
  } else {
    if (p.plan.columns == 184) return launch_cooperative<conv_flat_kernel<kMath, 184>>(p, stream);
    return launch_cooperative<conv_flat_kernel<kMath, 128>>(p, stream);
  }
}

}  // namespace

Status run_conv_flat_pack(const FlatPackParams& p, cudaStream_t stream) {
  const int64_t pieces = p.plan.packed_bytes / 16;
  const int blocks = static_cast<int>(std::min<int64_t>((pieces + 127) / 128, 2048));
  // Beside the end of the copy, which it does not depend on: it takes longer to start than to run.
  return launch_after<conv_flat_pack_kernel>(true, "conv_flat_pack_kernel", blocks, 128, stream, p);
}

bool flat_input_in_vectors(const FlatInput& in, const FlatPlan& plan) {
  return reinterpret_cast<uintptr_t>(in.x) % 16 == 0 && in.stride[2] == 1 && in.stride[1] % 8 == 0 &&
         in.stride[0] % 8 == 0 && in.stride_c % 8 == 0 && in.stride_n % 8 == 0 && plan.in[2] % 8 == 0;
}

Status run_conv_flat_input(const FlatInputParams& p, cudaStream_t stream) {
  const char* const name = "conv_flat_input_kernel";
  const FlatPlan& plan = p.plan;
  const FlatInput& in = p.input;
  const int64_t tiles = (plan.slots + kInputSlots - 1) / kInputSlots;
  if (tiles * p.n == 0) return Status::Ok();
  if (p.n >= 65536) return Status::Unsupported(name, "x is too large for the grid");
  const dim3 grid(static_cast<unsigned>(tiles), plan.chunks, p.n);
  if (p.dtype != Dtype::kFloat32) {
    if (flat_input_in_vectors(in, plan)) {
      const int64_t pieces =
          (int64_t(plan.in[0]) * plan.in[1] * (plan.in[2] / 8) + kFlatCopyVectors - 1) / kFlatCopyVectors;
      constexpr int kWarps = kPieceThreads / 32;
      const dim3 blocks(static_cast<unsigned>((pieces + kWarps - 1) / kWarps), plan.chunks, p.n);
      return launch_kernel<conv_flat_transpose_kernel>("conv_flat_transpose_kernel", p, blocks, kPieceThreads, 0,
                                                       stream);
    }
    const bool pairs = reinterpret_cast<uintptr_t>(in.x) % 4 == 0 && in.stride[2] == 1 && in.stride[1] % 2 == 0 &&
                       in.stride[0] % 2 == 0 && in.stride_c % 2 == 0 && in.stride_n % 2 == 0 && plan.in[2] % 2 == 0 &&
                       plan.out[2] % 2 == 0 && plan.plane % 2 == 0;
    if (pairs) return launch_input<conv_flat_input_kernel<true, 1, true>>(p, grid, stream);
    return launch_input<conv_flat_input_kernel<true, 1, false>>(p, grid, stream);
  }
  if (plan.parts == 1) {
    return launch_input<conv_flat_input_kernel<false, 1, false>>(p, grid, stream);
  }
  return launch_input<conv_flat_input_kernel<false, 2, false>>(p, grid, stream);
}

Status set_flat_input(FlatParams* p) {
  const FlatPlan& plan = p->plan;
  const bool half = plan.math == ConvMath::kBf16 || plan.math == ConvMath::kFp16;
  const cuuint64_t row_bytes = cuuint64_t(kFlatRowBytes) * plan.chunks * plan.parts;
  TensorMapSpec map{};
  map.type = plan.math == ConvMath::kBf16   ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
             : plan.math == ConvMath::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  map.rank = 3;
  map.sizes[0] = row_bytes / (half ? 2 : 4);
  map.sizes[1] = plan.slots;
  map.strides[0] = row_bytes;
  map.strides[1] = plan.sample_bytes;
  map.box[0] = kFlatRowBytes / (half ? 2 : 4);
  map.box[1] = plan.box_rows;
  map.box[2] = 1;
  map.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  for (const bool tail : {false, true}) {
    map.data = tail ? p->input.tail_copy : p->input.copy;
    map.sizes[2] = tail ? p->n - p->input.x_split : p->input.x_split;
    if (map.sizes[2] == 0) continue;
    const Status status = encode_tensor_map("conv_flat_kernel", map, tail ? p->x_tail_map : p->x_map);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status run_conv_flat(const FlatParams& p, cudaStream_t stream) {
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_columns<ConvMath::kTf32>(p, stream);
    case ConvMath::kTf32x3: return launch_columns<ConvMath::kTf32x3>(p, stream);
    case ConvMath::kBf16: return launch_columns<ConvMath::kBf16>(p, stream);
    default: return launch_columns<ConvMath::kFp16>(p, stream);
  }
}

}  // namespace kgopt
