// PyTorch's switch for TF32 in convolutions, which the stable ABI does not expose. The Python package installs
// functions that read and set it; without them (a C++ program) the answer is PyTorch's default, which allows TF32.
#pragma once

#include <optional>

namespace kgopt {

bool tf32_allowed_by_default();

inline bool resolve_allow_tf32(std::optional<bool> allow_tf32) {
  return allow_tf32 ? *allow_tf32 : tf32_allowed_by_default();
}

// While it lives, ATen's convolutions have the precision that a call was given, if it was given one.
class Tf32Switch {
 public:
  explicit Tf32Switch(std::optional<bool> allow_tf32);
  ~Tf32Switch();
  Tf32Switch(const Tf32Switch&) = delete;
  Tf32Switch& operator=(const Tf32Switch&) = delete;

 private:
  bool turned_ = false;
};

}  // namespace kgopt
