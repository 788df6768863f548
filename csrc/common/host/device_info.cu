#include "common/host/device_info.h"

#include <cuda_runtime.h>

#include <mutex>

namespace kgopt {
namespace {

constexpr int kMaxDevices = 64;

// Its static shared memory tells which of its versions the driver chose.
__global__ void code_probe_kernel(int* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ volatile int marker;
  marker = 1;
  *out = marker;
#else
  *out = 0;
#endif
}

}  // namespace

Status device_info(int device, DeviceInfo* info) {
  static std::mutex mutex;
  static DeviceInfo cache[kMaxDevices];
  static bool known[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) return Status::Invalid("device_info", "device index above 63");
  std::lock_guard<std::mutex> lock(mutex);
  if (!known[device]) {
    DeviceInfo d;
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d.sm_count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&d.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&d.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    }
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d.l2_bytes, cudaDevAttrL2CacheSize, device);
    if (error != cudaSuccess) return {StatusCode::kCudaError, "device_info", cudaGetErrorString(error)};
    d.compute_capability = major * 10 + minor;
    cudaFuncAttributes attributes;
    d.has_code = cudaFuncGetAttributes(&attributes, code_probe_kernel) == cudaSuccess;
    d.has_wgmma = d.has_code && attributes.sharedSizeBytes > 0;
    if (!d.has_code) cudaGetLastError();  // it was a question; leave no error behind
    cache[device] = d;
    known[device] = true;
  }
  *info = cache[device];
  return Status::Ok();
}

}  // namespace kgopt
