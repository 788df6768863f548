// From the Gram plan's numbers to a template instance of its kernel.
#pragma once

#include <cuda.h>

#include "../common/launch.h"
#include "conv3d_gram.h"
#include "conv3d_gram_kernel.cuh"

namespace kgopt {

// The tensor map of x, from the other parameters.
inline Status map_gram_input(GramParams* p, int64_t n) {
  const char* const name = "conv_gram_kernel";
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  if (found != cudaDriverEntryPointSuccess) {
    return Status::Unsupported(name, "the driver has no cuTensorMapEncodeTiled");
  }
  const cuuint64_t size = p->dtype == Dtype::kFloat32 ? 4 : 2;
  const cuuint64_t sizes[5] = {cuuint64_t(p->in[2]), cuuint64_t(p->in[1]), cuuint64_t(p->in[0]), cuuint64_t(p->c_in),
                               cuuint64_t(n)};
  // A dim of size 1 may have any stride, which the map would refuse.
  const int64_t strides[4] = {p->x_stride[1], p->x_stride[0], p->x_stride_c, p->x_stride_n};
  cuuint64_t bytes[4], dense = sizes[0] * size;
  for (int i = 0; i < 4; ++i) {
    bytes[i] = sizes[i + 1] == 1 ? dense : strides[i] * size;
    dense = bytes[i] * sizes[i + 1];
  }
  const cuuint32_t box[5] = {cuuint32_t(p->plan.vectors * 4), cuuint32_t(p->plan.raw_rows), 1, cuuint32_t(p->c_in), 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = p->dtype == Dtype::kFloat32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : p->dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  static_assert(sizeof(p->x_map) == sizeof(CUtensorMap));
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      reinterpret_cast<CUtensorMap*>(p->x_map), type, 5, const_cast<void*>(p->x), sizes, bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return Status::Invalid(name, "the tensor copies cannot describe x");
  return Status::Ok();
}

template <typename Element, int kChannels>
Status launch_gram_instance(const GramParams& p, int64_t n, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(n * p.plan.slices));
  return launch_kernel<conv_gram_kernel<Element, kChannels>>("conv_gram_kernel", p, grid, kGramThreads,
                                                             p.plan.smem_bytes, stream);
}

template <typename Element>
Status launch_gram(const GramParams& params, int64_t n, cudaStream_t stream) {
  GramParams p = params;
  if (const Status status = map_gram_input(&p, n); !status.ok()) return status;
  return p.plan.channels == 4 ? launch_gram_instance<Element, 4>(p, n, stream)
                              : launch_gram_instance<Element, 8>(p, n, stream);
}

}  // namespace kgopt
