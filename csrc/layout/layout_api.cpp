// Tensors in the other memory format, on CUDA.
#include "layout/layout_api.h"

namespace kgopt {
namespace {

bool is_floating(const Tensor& t) {
  const ScalarType type = t.scalar_type();
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
         type == ScalarType::BFloat16;
}

// Whether transpose_into is faster than torch's copy: with fewer channels most of a tile is empty.
bool fills_tiles(const Tensor& t, MemoryFormat format) {
  return t.size(1) >= (format == MemoryFormat::Contiguous ? 16 : 24);
}

Tensor in_format(Tensor x, bool channels_last) {
  const char* const op = "in_format";
  const MemoryFormat format = check_in_format(op, x, channels_last);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  if (is_dense(x, format)) return copied_in(x, format);
  std::optional<Tensor> y = transposed_copy(x, format);
  return y ? *std::move(y) : copied_in(x, format);
}

}  // namespace

std::optional<Tensor> transposed_copy(const Tensor& t, MemoryFormat format) {
  if ((t.dim() != 4 && t.dim() != 5) || t.numel() == 0 || !is_floating(t) || !fills_tiles(t, format)) return {};
  const bool to_contiguous = format == MemoryFormat::Contiguous;
  if (!is_dense(t, to_contiguous ? channels_last_format(t.dim()) : MemoryFormat::Contiguous)) return {};
  Tensor y = empty_like_shape(t, sizes_of(t), std::nullopt, format);
  transpose_into("dense_in", t, y);
  return y;
}

}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) { m.impl("in_format", TORCH_BOX(&kgopt::in_format)); }
