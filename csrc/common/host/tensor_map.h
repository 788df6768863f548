// Tensor maps: how the tensor copy engine sees a tensor, and which box of it a copy brings. Torch-free.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "common/status.h"

namespace kgopt {

// What the driver needs to know; dims from the innermost, whose stride is one element.
struct TensorMapSpec {
  CUtensorMapDataType type;
  int rank;
  const void* data;
  cuuint64_t sizes[5];
  cuuint64_t strides[4];  // bytes, of the dims after the first
  cuuint32_t box[5];
  CUtensorMapSwizzle swizzle;
};

// The driver's function, which is asked for once. Null with an error.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder(const char* name, Status* status) {
  struct Found {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error;
    Found() {
#if CUDART_VERSION >= 12050
      error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
#else
      error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    }
  };
  static const Found found;
  if (found.error != cudaSuccess) {
    *status = {StatusCode::kCudaError, name, cudaGetErrorString(found.error)};
    return nullptr;
  }
  if (found.result != cudaDriverEntryPointSuccess) {
    *status = Status::Unsupported(name, "the driver has no cuTensorMapEncodeTiled");
    return nullptr;
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found.entry);
}

// `map` lies in a kernel's parameters, aligned to 64 bytes. What lies outside of the tensor is read as zeros.
inline Status encode_tensor_map(const char* name, const TensorMapSpec& spec, uint64_t (&map)[16]) {
  static_assert(sizeof(map) == sizeof(CUtensorMap));
  Status status = Status::Ok();
  const auto encode = tensor_map_encoder(name, &status);
  if (!encode) return status;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(map), spec.type, spec.rank, const_cast<void*>(spec.data), spec.sizes,
             spec.strides, spec.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, spec.swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return Status::Invalid(name, "the tensor copies cannot describe a tensor");
  return Status::Ok();
}

}  // namespace kgopt
