// The part of a launch that is the same for every kernel. Host code only.
#include "common/host/launch.h"

#include <mutex>

namespace kgopt {
namespace {

// Whether the kernel may be launched early on the current device: it runs code built for compute capability 9.0 or
// later, since older code does not wait, and the driver can have such launches in graphs.
bool can_start_early(const void* kernel, KernelFacts& facts) {
  int device = 0, driver = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= KernelFacts::kDevices) return false;
  int answer = facts.starts_early[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes attributes;
    const bool asked =
        cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && cudaDriverGetVersion(&driver) == cudaSuccess;
    if (!asked) cudaGetLastError();  // it was a question; leave no error behind
    answer = asked && attributes.ptxVersion >= 90 && driver >= 12030 ? 1 : -1;
    facts.starts_early[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 1;
}

}  // namespace

cudaError_t allow_dynamic_smem(const void* kernel, KernelFacts& facts, int bytes) {
  static std::mutex mutex;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const bool known = device < KernelFacts::kDevices;
  if (known && bytes <= facts.smem_bytes[device].load(std::memory_order_acquire)) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(mutex);
  if (known && bytes <= facts.smem_bytes[device].load(std::memory_order_relaxed)) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && known) facts.smem_bytes[device].store(bytes, std::memory_order_release);
  return error;
}

Status launch_with(const void* kernel, KernelFacts& facts, const char* name, const LaunchShape& shape,
                   cudaStream_t stream, void** args) {
  cudaError_t error = allow_dynamic_smem(kernel, facts, shape.smem_bytes);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (shape.early && can_start_early(kernel, facts)) {
      cudaLaunchAttribute& attribute = attributes[count++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[count++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = shape.cluster;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    if (count == 0) {  // as <<<>>> does
      error = cudaLaunchKernel(kernel, shape.grid, dim3(shape.threads), args, shape.smem_bytes, stream);
    } else {
      cudaLaunchConfig_t config{};
      config.gridDim = shape.grid;
      config.blockDim = dim3(shape.threads);
      config.dynamicSmemBytes = shape.smem_bytes;
      config.stream = stream;
      config.attrs = attributes;
      config.numAttrs = count;
      error = cudaLaunchKernelExC(&config, kernel, args);
    }
  }
  const cudaError_t last = cudaGetLastError();  // leaves none behind
  if (error == cudaSuccess) error = last;
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
