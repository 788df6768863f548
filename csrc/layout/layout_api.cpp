// Tensors in the other memory format, on CUDA.
#include "layout/layout_api.h"

namespace kgopt {
namespace {

// Whether transpose_into converts from one to the other.
bool has_kernel(ScalarType from, ScalarType to) {
  const auto is_half = [](ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; };
  if (from == to) return is_floating(from);
  return (from == ScalarType::Float && is_half(to)) || (is_half(from) && to == ScalarType::Float);
}

// Whether transpose_into is faster than torch's copy: with fewer channels most of a tile is empty.
bool fills_tiles(const Tensor& t, MemoryFormat format) {
  return t.size(1) >= (format == MemoryFormat::Contiguous ? 16 : 24);
}

Tensor in_format(Tensor x, bool channels_last, std::optional<ScalarType> dtype) {
  const char* const op = "in_format";
  const MemoryFormat format = check_in_format(op, x, channels_last);
  const ScalarType type = check_result_dtype(op, x, dtype);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  if (is_dense(x, format)) return copied_in(x, format, type);
  std::optional<Tensor> y = transposed_copy(x, format, type);
  return y ? *std::move(y) : copied_in(x, format, type);
}

}  // namespace

std::optional<Tensor> transposed_copy(const Tensor& t, MemoryFormat format, ScalarType dtype) {
  if ((t.dim() != 4 && t.dim() != 5) || t.numel() == 0 || !fills_tiles(t, format)) return {};
  if (!has_kernel(t.scalar_type(), dtype)) return {};
  const bool to_contiguous = format == MemoryFormat::Contiguous;
  if (!is_dense(t, to_contiguous ? channels_last_format(t.dim()) : MemoryFormat::Contiguous)) return {};
  Tensor y = empty_like_shape(t, sizes_of(t), dtype, format);
  transpose_into("dense_in", t, y);
  return y;
}

}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) { m.impl("in_format", TORCH_BOX(&kgopt::in_format)); }
