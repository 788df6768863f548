// A tensor in the other memory format, on the CPU.
#include "layout/layout_checks.h"

namespace kgopt {
namespace {

Tensor in_format(Tensor x, bool channels_last, std::optional<ScalarType> dtype) {
  const char* const op = "in_format";
  const MemoryFormat format = check_in_format(op, x, channels_last);
  return copied_in(x, format, check_result_dtype(op, x, dtype));
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) { m.impl("in_format", TORCH_BOX(&kgopt::in_format)); }
