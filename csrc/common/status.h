// What a launcher hands back instead of throwing: kernels and launchers know nothing of torch, so the
// api layer turns a Status into a Python exception.
#pragma once

namespace kgopt {

enum class StatusCode { kOk, kInvalidArgument, kUnsupported, kCudaError };

struct Status {
  StatusCode code = StatusCode::kOk;
  const char* kernel = "";  // the kernel or launcher that failed
  const char* reason = "";  // static text: a cudaGetErrorString result, or which argument is refused and why

  bool ok() const { return code == StatusCode::kOk; }

  static Status Ok() { return {}; }
  static Status Unsupported(const char* kernel, const char* reason) {
    return {StatusCode::kUnsupported, kernel, reason};
  }
  static Status Invalid(const char* kernel, const char* reason) {
    return {StatusCode::kInvalidArgument, kernel, reason};
  }
};

}  // namespace kgopt
