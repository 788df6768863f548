// A tensor in the other memory format, on the CPU.
#include "layout/layout_checks.h"

namespace kgopt {
namespace {

Tensor in_format(Tensor x, bool channels_last) { return copied_in(x, check_in_format("in_format", x, channels_last)); }

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) { m.impl("in_format", TORCH_BOX(&kgopt::in_format)); }
