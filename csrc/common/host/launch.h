// Launch of kernels. Templates hold what is a kernel's own; launch.cu holds the rest once, for all of them: hundreds of
// instances would each have the host compiler translate it again.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "common/status.h"

namespace kgopt {

// What is known of a kernel, by device. All zeros at first.
struct KernelFacts {
  static constexpr int kDevices = 64;
  std::atomic<int> smem_bytes[kDevices];    // dynamic shared memory that it may be launched with
  std::atomic<int> starts_early[kDevices];  // 1: it may, -1: it may not, 0: not yet asked
};
template <auto kKernel>
KernelFacts& facts_of() {
  static KernelFacts facts;
  return facts;
}

// Lets the kernel be launched with `bytes` of dynamic shared memory on the current device. The limit is the kernel's,
// not the launch's, so it is only ever raised: a smaller plan in another thread must not take it back before the
// launch.
cudaError_t allow_dynamic_smem(const void* kernel, KernelFacts& facts, int bytes);
template <auto kKernel>
cudaError_t allow_dynamic_smem(int bytes) {
  return allow_dynamic_smem(reinterpret_cast<const void*>(kKernel), facts_of<kKernel>(), bytes);
}

struct LaunchShape {
  dim3 grid;
  int threads;
  int smem_bytes;
  bool early = false;  // it may start before the kernel ahead has ended: see dependent_launch.cuh
  int cluster = 1;     // blocks along the grid's x
};

Status launch_with(const void* kernel, KernelFacts& facts, const char* name, const LaunchShape& shape,
                   cudaStream_t stream, void** args);

template <typename T>
struct NotDeduced {
  using Type = T;
};
// The arguments are converted to what the kernel takes, as in a call of it.
template <typename... Params>
Status launch_with(void (*kernel)(Params...), KernelFacts& facts, const char* name, const LaunchShape& shape,
                   cudaStream_t stream, const typename NotDeduced<Params>::Type&... args) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return launch_with(reinterpret_cast<const void*>(kernel), facts, name, shape, stream, addresses);
}

template <auto kKernel, typename Params>
Status launch_kernel(const char* name, const Params& p, dim3 grid, int threads, int smem_bytes, cudaStream_t stream) {
  return launch_with(kKernel, facts_of<kKernel>(), name, {grid, threads, smem_bytes}, stream, p);
}

}  // namespace kgopt
