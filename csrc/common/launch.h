// What a launch sets on its kernel first.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

namespace kgopt {

// Lets kKernel be launched with `bytes` of dynamic shared memory on the current device. The limit is the kernel's, not
// the launch's, so it is only ever raised: a smaller plan in another thread must not take it back before the launch.
template <auto kKernel>
cudaError_t allow_dynamic_smem(int bytes) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static int allowed[kDevices];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < kDevices && bytes <= allowed[device]) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = bytes;
  return error;
}

}  // namespace kgopt
