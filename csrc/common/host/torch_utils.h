// What every api and cpu file needs of torch's stable ABI: aliases, checks, layouts, allocation, errors.
// Never included from a .cu, .cuh or params file.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/act_names.h"
#include "common/dtype.h"
#include "common/status.h"

#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)  // its name in the headers of torch 2.10
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace kgopt {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;
using IntArray = std::vector<int64_t>;

// Raises a RuntimeError whose text is exactly the message: "<op>: <argument> ... got ..., expected ...".
template <typename... Args>
[[noreturn]] inline void fail(const Args&... args) {
  std::ostringstream oss;
  ((oss << args), ...);
  throw std::runtime_error(oss.str());
}

#define KGOPT_CHECK(cond, ...)               \
  do {                                       \
    if (!(cond)) ::kgopt::fail(__VA_ARGS__); \
  } while (0)

inline std::string shape_string(const Tensor& t) {
  std::ostringstream oss;
  oss << "[";
  for (int64_t i = 0; i < t.dim(); ++i) oss << (i ? ", " : "") << t.size(i);
  oss << "]";
  return oss.str();
}

inline std::string list_string(const IntArray& v) {
  std::ostringstream oss;
  oss << "[";
  for (size_t i = 0; i < v.size(); ++i) oss << (i ? ", " : "") << v[i];
  oss << "]";
  return oss.str();
}

inline IntArray sizes_of(const Tensor& t) {
  IntArray v(t.dim());
  for (int64_t i = 0; i < t.dim(); ++i) v[i] = t.size(i);
  return v;
}

inline const char* scalar_type_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "an unsupported dtype";
  }
}

inline Dtype check_dtype(const char* op, const char* arg, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::Double: return Dtype::kFloat64;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    default:
      fail(op, ": ", arg, " has dtype ", scalar_type_name(t.scalar_type()),
           ", expected float32, bfloat16, float16 or float64");
  }
}

inline std::string device_string(const Tensor& t) {
  return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : (t.is_cpu() ? "cpu" : "another device");
}

inline void check_same_device(const char* op, const char* arg, const Tensor& t, const Tensor& x) {
  KGOPT_CHECK(t.is_cuda() == x.is_cuda() && t.is_cpu() == x.is_cpu() && t.get_device_index() == x.get_device_index(),
              op, ": ", arg, " is on ", device_string(t), ", expected the device of x, ", device_string(x));
}

inline void check_same_dtype(const char* op, const char* arg, const Tensor& t, const Tensor& x) {
  KGOPT_CHECK(t.scalar_type() == x.scalar_type(), op, ": ", arg, " has dtype ", scalar_type_name(t.scalar_type()),
              ", expected the dtype of x, ", scalar_type_name(x.scalar_type()));
}

// For weights that are rounded where they are read: of the dtype of x, or float32 beside a half type.
inline void check_weight_dtype(const char* op, const char* arg, const Tensor& t, const Tensor& x) {
  const bool half = x.scalar_type() == ScalarType::Half || x.scalar_type() == ScalarType::BFloat16;
  if (half && t.scalar_type() == ScalarType::Float) return;
  check_same_dtype(op, arg, t, x);
}

inline ActChain check_act(const char* op, const std::string& act, const char* argument = "act") {
  ActChain chain;
  std::string error;
  KGOPT_CHECK(parse_act_chain(act, &chain, &error), op, ": ", argument, " ", error);
  return chain;
}

// At a multiple of 16 bytes, where vectors and bulk copies can read it.
inline bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }
inline Tensor aligned(const Tensor& t) { return is_aligned(t) ? t : torch::stable::clone(t); }

// The rule of torch's suggest_memory_format for rank 4 and 5: strides that order the dims as N, spatial, C.
// Ambiguous shapes (C == 1, or all spatial sizes 1) resolve as torch resolves them.
inline bool is_channels_last(const Tensor& t) {
  const int64_t rank = t.dim();
  if (rank != 4 && rank != 5) return false;
  if (t.stride(1) == 0) return false;
  int64_t min_stride = 0;
  std::vector<int64_t> order{1};
  for (int64_t d = rank - 1; d >= 2; --d) order.push_back(d);
  order.push_back(0);
  for (int64_t d : order) {
    if (t.size(d) == 0) return false;
    if (t.stride(d) < min_stride) return false;
    if (d == 0 && min_stride == t.stride(1)) return false;
    min_stride = t.stride(d);
    if (t.size(d) > 1) min_stride *= t.size(d);
  }
  return true;
}

inline MemoryFormat channels_last_format(int64_t rank) {
  return rank == 5 ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast;
}

inline MemoryFormat memory_format_of(const Tensor& t) {
  return is_channels_last(t) ? channels_last_format(t.dim()) : MemoryFormat::Contiguous;
}

// Dense in exactly this format: strides as a fresh allocation would have them (sizes of 1 do not matter).
inline bool is_dense(const Tensor& t, MemoryFormat format) {
  const int64_t rank = t.dim();
  int64_t expected = 1;
  auto matches = [&](int64_t d) {
    bool ok = t.size(d) == 1 || t.stride(d) == expected;
    expected *= t.size(d);
    return ok;
  };
  if (t.numel() == 0) return true;
  if (format == MemoryFormat::Contiguous) {
    for (int64_t d = rank - 1; d >= 0; --d) {
      if (!matches(d)) return false;
    }
    return true;
  }
  if (!matches(1)) return false;
  for (int64_t d = rank - 1; d >= 2; --d) {
    if (!matches(d)) return false;
  }
  return matches(0);
}

#if defined(KGOPT_CUDA)
// layout/: a copy of a CUDA tensor that is dense in the other format, in a dtype, by a kernel that keeps pace with the
// memory; nothing where torch's copy is as fast.
std::optional<Tensor> transposed_copy(const Tensor& t, MemoryFormat format, ScalarType dtype);
#endif

// The tensor itself when it is dense in `format`, else a copy that is.
inline Tensor dense_in(const Tensor& t, MemoryFormat format) {
  if (is_dense(t, format)) return t;
#if defined(KGOPT_CUDA)
  if (t.is_cuda()) {
    if (std::optional<Tensor> copy = transposed_copy(t, format, t.scalar_type())) return *std::move(copy);
  }
#endif
  return torch::stable::contiguous(t, format);
}

// An uninitialized tensor on the device of `like`. By the shim itself: torch::stable::empty looks its op up by name, at
// every call.
inline Tensor empty_like_shape(const Tensor& like, const IntArray& sizes,
                               std::optional<ScalarType> dtype = std::nullopt,
                               MemoryFormat format = MemoryFormat::Contiguous) {
  const int rank = static_cast<int>(sizes.size());
  constexpr int kMaxRank = 8;
  int64_t strides[kMaxRank], next = 1;
  bool empty = rank > kMaxRank;
  auto put = [&](int d) {
    strides[d] = next;
    next *= sizes[d];
    empty = empty || (sizes[d] == 0 && rank > 1);
  };
  const bool innermost = !empty && format != MemoryFormat::Contiguous;
  if (innermost) put(1);
  for (int d = rank - 1; !empty && d >= (innermost ? 2 : 0); --d) put(d);
  if (innermost) put(0);
  if (empty) {  // where strides follow rules of their own
    return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()),
                                dtype ? *dtype : like.scalar_type(), std::nullopt, like.device(), std::nullopt, format);
  }
  int32_t type, device_type, device_index;
  if (dtype) {
    type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
  } else {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  }
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(rank, sizes.data(), strides, type, device_type, device_index, &made));
  return Tensor(made);
}

// fp64 input keeps fp64 statistics; everything else is accumulated and reported in fp32.
inline ScalarType stats_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void raise_on_error(const char* op, const Status& s) { KGOPT_CHECK(s.ok(), op, ": ", s.kernel, ": ", s.reason); }

inline Tensor as_type_of(const Tensor& t, const Tensor& x) {
  return t.scalar_type() == x.scalar_type() ? t : torch::stable::to(t, x.scalar_type());
}

// Both by one copy, where a kernel can.
inline Tensor dense_as_type_of(const Tensor& t, MemoryFormat format, const Tensor& x) {
#if defined(KGOPT_CUDA)
  if (t.is_cuda() && t.scalar_type() != x.scalar_type() && !is_dense(t, format)) {
    if (std::optional<Tensor> copy = transposed_copy(t, format, x.scalar_type())) return *std::move(copy);
  }
#endif
  return as_type_of(dense_in(t, format), x);
}

// A weight for ATen's convolution, in the dtype of x. Beside a channels_last x ATen brings it into that format, by a
// copy of single elements: here it lies so already, where a kernel can.
inline Tensor weight_for_aten(const Tensor& weight, const Tensor& x) {
#if defined(KGOPT_CUDA)
  const MemoryFormat format = channels_last_format(weight.dim());
  if (x.is_cuda() && is_channels_last(x) && !is_dense(weight, format)) {
    if (std::optional<Tensor> copy = transposed_copy(weight, format, x.scalar_type())) return *std::move(copy);
  }
#endif
  return as_type_of(weight, x);
}

// Calls an ATen op by name; arguments must have the schema's exact types.
template <typename... Args>
inline Tensor call_aten(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args) == 0 ? 1 : sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace kgopt

#if defined(KGOPT_CUDA)
// Null in a CPU-only libtorch, which is why it is declared weak: the same wheel must load there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

#include <cuda_runtime_api.h>

#include "common/host/device_info.h"

namespace kgopt {

// The device's facts, or an exception that says why kgopt cannot run there.
inline DeviceInfo check_gpu(const char* op, const Tensor& x) {
  DeviceInfo info;
  raise_on_error(op, device_info(x.get_device_index(), &info));
  KGOPT_CHECK(info.compute_capability >= 80, op, ": x is on ", device_string(x), " with compute capability ",
              info.compute_capability / 10, ".", info.compute_capability % 10, ", expected 8.0 or later");
  KGOPT_CHECK(info.has_code, op, ": x is on ", device_string(x), " with compute capability ",
              info.compute_capability / 10, ".", info.compute_capability % 10,
              ", expected one that this build has code for (", KGOPT_ARCHS, "); rebuild with KGOPT_CUDA_ARCHS");
  return info;
}

inline void* current_stream(const Tensor& t) {
  void* stream = nullptr;
  KGOPT_CHECK(&aoti_torch_get_current_cuda_stream != nullptr, "kgopt: this torch has no CUDA");
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return stream;
}
inline cudaStream_t stream_of(const Tensor& t) { return static_cast<cudaStream_t>(current_stream(t)); }
}  // namespace kgopt
#endif
