// Small chains of the first and third pipeline in one launch.
#include "conv3d/small_chain/small_chain.h"

#include "common/host/launch.h"
#include "conv3d/small_chain/kernel.cuh"

namespace kgopt {
namespace {

template <int kBatch, bool kExact>
Status launch_chain(const ChainParams& p, cudaStream_t stream) {
  constexpr auto kernel = conv_chain_kernel<kBatch, kExact>;
  cudaError_t error = allow_dynamic_smem<kernel>(p.plan.smem_bytes);
  if (error == cudaSuccess && p.plan.blocks > 8 && !p.plan.is_team) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cudaLaunchAttribute together{};
  if (p.plan.is_team) {
    together.id = cudaLaunchAttributeCooperative;  // blocks wait for each other's moments
    together.val.cooperative = 1;
    if (error == cudaSuccess) error = cudaMemsetAsync(p.arrived, 0, p.n * sizeof(uint32_t), stream);
  } else {
    together.id = cudaLaunchAttributeClusterDimension;
    together.val.clusterDim.x = p.plan.blocks;
    together.val.clusterDim.y = together.val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.n * p.plan.blocks));
  config.blockDim = dim3(p.plan.threads);
  config.dynamicSmemBytes = p.plan.smem_bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = p.plan.blocks > 1 ? 1 : 0;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // it was a question; leave no error behind
    return Status::Unsupported("conv_chain_kernel", "not all blocks can run at a time");
  }
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, "conv_chain_kernel", cudaGetErrorString(error)};
  return Status::Ok();
}

template <bool kExact>
Status launch_batch(const ChainParams& p, cudaStream_t stream) {
  switch (p.plan.n_batch) {
    case 1: return launch_chain<1, kExact>(p, stream);
    case 2: return launch_chain<2, kExact>(p, stream);
    default: return launch_chain<4, kExact>(p, stream);
  }
}

}  // namespace

Status run_conv_chain(const ChainParams& p, cudaStream_t stream) {
  if (p.n == 0) return Status::Ok();
  return p.plan.exact ? launch_batch<true>(p, stream) : launch_batch<false>(p, stream);
}

}  // namespace kgopt
