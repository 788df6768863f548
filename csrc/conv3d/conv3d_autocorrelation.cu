// Statistics of a 2D convolution of few channels from its input's autocorrelation: from the plan's numbers to template
// instances.
#include "conv3d_autocorrelation.h"

#include <algorithm>

#include "../common/dependent_launch.cuh"
#include "../common/tensor_map.h"
#include "conv3d_autocorrelation_kernel.cuh"

namespace kgopt {
namespace {

template <typename Element, bool kVectors>
Status launch_instance(const AutocorrelationParams& p, int64_t n, cudaStream_t stream) {
  constexpr auto kernel = conv_autocorrelation_kernel<Element, kVectors>;
  const dim3 grid(static_cast<unsigned>(n * p.plan.slices));
  const Status status = launch_after<kernel>(false, "conv_autocorrelation_kernel", grid, kAutocorrelationThreads,
                                             p.plan.smem_bytes, stream, p);
  if (!status.ok() || p.plan.slices == 1) return status;
  constexpr auto finish = conv_autocorrelation_finish_kernel<Element>;
  return launch_after<finish>(true, "conv_autocorrelation_finish_kernel", dim3(static_cast<unsigned>(n)),
                              kAutocorrelationThreads, p.plan.finish_smem_bytes, stream, p);
}

template <typename Element>
Status set_map(AutocorrelationParams* p, int64_t n) {
  TensorMapSpec map{};
  map.type = std::is_same_v<Element, float>    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
             : std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  map.rank = 4;
  map.data = p->x;
  const int64_t sizes[4] = {p->in[2], p->c_in, p->in[1], n};
  const int64_t strides[3] = {p->x_stride_c, p->x_stride[1], p->x_stride_n};
  std::copy(sizes, sizes + 4, map.sizes);
  // A dim of size 1 may have any stride, which the map would refuse.
  for (int i = 0; i < 3; ++i) map.strides[i] = (sizes[i + 1] == 1 ? p->in[2] : strides[i]) * sizeof(Element);
  map.box[0] = p->plan.row_columns, map.box[1] = kAutocorrelationChannels, map.box[2] = kAutocorrelationStageRows,
  map.box[3] = 1;
  map.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  return encode_tensor_map("conv_autocorrelation_kernel", map, p->x_map);
}

template <typename Element>
Status launch(AutocorrelationParams p, int64_t n, cudaStream_t stream) {
  if (!p.vectors) return launch_instance<Element, false>(p, n, stream);
  const Status status = set_map<Element>(&p, n);
  return status.ok() ? launch_instance<Element, true>(p, n, stream) : status;
}

}  // namespace

Status run_conv_autocorrelation(const AutocorrelationParams& p, int64_t n, cudaStream_t stream) {
  if (n == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch<float>(p, n, stream);
    case ConvMath::kBf16: return launch<__nv_bfloat16>(p, n, stream);
    case ConvMath::kFp16: return launch<__half>(p, n, stream);
    default: return Status::Unsupported("conv_autocorrelation_kernel", "no instance of fp32 accuracy");
  }
}

}  // namespace kgopt
