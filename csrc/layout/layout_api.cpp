// A tensor in the other memory format, on CUDA.
#include "layout/layout_api.h"

namespace kgopt {
namespace {

Tensor in_format(Tensor x, bool channels_last) {
  const char* const op = "in_format";
  const MemoryFormat format = check_in_format(op, x, channels_last);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat other = channels_last ? MemoryFormat::Contiguous : channels_last_format(x.dim());
  if (!is_dense(x, other) || is_dense(x, format) || !fills_tiles(x, format)) return copied_in(x, format);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  transpose_into(op, x, y);
  return y;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) { m.impl("in_format", TORCH_BOX(&kgopt::in_format)); }
