// PyTorch's switch for TF32 in convolutions, which the stable ABI does not expose. The Python package installs a
// function that reads it; without one (a C++ program) the answer is PyTorch's default, which allows TF32.
#pragma once

#include <optional>

namespace kgopt {

bool tf32_allowed_by_default();

inline bool resolve_allow_tf32(std::optional<bool> allow_tf32) {
  return allow_tf32 ? *allow_tf32 : tf32_allowed_by_default();
}

}  // namespace kgopt
