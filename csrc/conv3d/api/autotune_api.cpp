// Measures paths of convolutions, and keeps what was measured: a text file for each GPU model and set of versions,
// replaced whole, so that processes that tune at the same time lose a measurement at worst.
#include "conv3d/api/autotune.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/host/cache_prefix.h"

namespace kgopt {
namespace {

constexpr const char* kHeader = "kgopt convolutions 1";
constexpr struct {
  const char* name;
  ConvPath path;
} kNames[] = {{"aten", ConvPath::kAten},
              {"implicit_gemm", ConvPath::kImplicitGemm},
              {"tap_columns", ConvPath::kTapColumns},
              {"position_rows", ConvPath::kPositionRows},
              {"few_channels", ConvPath::kFewChannels},
              {"depthwise", ConvPath::kDepthwise},
              // As files of the first versions have them.
              {"hopper", ConvPath::kTapColumns},
              {"rows", ConvPath::kPositionRows},
              {"narrow", ConvPath::kFewChannels}};

using Known = std::map<ConvKey, ConvPath>;

std::mutex mutex;
std::string prefix;                         // of the files that were read
int64_t generation = 0;                     // of what is known
std::map<std::string, Known> known_by_gpu;  // by the name of the GPU

std::string gpu_name(int device) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    cudaGetLastError();  // it was a question; leave no error behind
    return "unknown";
  }
  std::string name = properties.name;
  for (char& c : name) {
    if (!isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

std::string file_of(const std::string& gpu) { return prefix + "-" + gpu + ".txt"; }

// A line is the key's numbers and the name of the path. What is not one is passed over.
void read_file(const std::string& gpu, Known* known) {
  std::ifstream file(file_of(gpu));
  std::string line;
  if (!std::getline(file, line) || line != kHeader) return;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    ConvKey key;
    bool whole = true;
    for (int64_t& value : key) whole = whole && words >> value;
    std::string name;
    if (!whole || !(words >> name)) continue;
    for (const auto& entry : kNames) {
      if (name == entry.name) known->emplace(key, entry.path);
    }
  }
}

void write_file(const std::string& gpu, const Known& known) {
  const std::string part = file_of(gpu) + "." + std::to_string(getpid()) + ".part";
  {
    std::ofstream file(part);
    file << kHeader << "\n";
    for (const auto& [key, path] : known) {
      for (const int64_t value : key) file << value << " ";
      for (const auto& entry : kNames) {
        if (path != entry.path) continue;
        file << entry.name << "\n";
        break;
      }
    }
    if (!file.flush()) {  // a full disk costs the memory of it, not the result
      std::remove(part.c_str());
      return;
    }
  }
  if (std::rename(part.c_str(), file_of(gpu).c_str()) != 0) std::remove(part.c_str());
}

// With the mutex held.
Known& known_on(int device) {
  if (std::string now = cache_prefix(); now != prefix) {
    prefix = std::move(now);
    known_by_gpu.clear();
  }
  if (const int64_t now = cache_generation(); now != generation) {
    generation = now;
    known_by_gpu.clear();
  }
  static std::map<int, std::string> names;
  auto name = names.find(device);
  if (name == names.end()) name = names.emplace(device, gpu_name(device)).first;
  const auto [found, is_new] = known_by_gpu.try_emplace(name->second);
  if (is_new && !prefix.empty()) read_file(name->second, &found->second);
  return found->second;
}

// Events wait for the stream, which a graph that another thread captures would forbid.
class Relaxed {
 public:
  Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Microseconds of the fastest of a few rounds of calls, for each path; below 0 where one failed.
std::vector<double> measure(const std::vector<ConvPath>& paths, cudaStream_t stream,
                            const std::function<void(ConvPath)>& run) {
  constexpr int kRounds = 3, kCalls = 5;
  std::vector<double> best(paths.size(), -1);
  std::vector<bool> runs(paths.size(), true);
  cudaEvent_t begin, end;
  if (cudaEventCreate(&begin) != cudaSuccess) return best;
  if (cudaEventCreate(&end) != cudaSuccess) {
    cudaEventDestroy(begin);
    return best;
  }
  for (int round = -1; round < kRounds; ++round) {  // the first is not counted: what happens once happens in it
    for (size_t i = 0; i < paths.size(); ++i) {
      if (!runs[i]) continue;
      try {
        cudaEventRecord(begin, stream);
        for (int call = 0; call < (round < 0 ? 1 : kCalls); ++call) run(paths[i]);
        cudaEventRecord(end, stream);
      } catch (const std::exception&) {  // out of memory, for one; the path that is chosen says so itself
        runs[i] = false;
        best[i] = -1;
        continue;
      }
      float ms = 0;
      if (cudaEventSynchronize(end) != cudaSuccess || cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) continue;
      if (round >= 0 && (best[i] < 0 || ms * 1e3 / kCalls < best[i])) best[i] = ms * 1e3 / kCalls;
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best;
}

}  // namespace

bool autotune_is_on() {
  static const bool on = [] {
    const char* const value = std::getenv("KGOPT_AUTOTUNE");
    return value && *value && std::string(value) != "0";
  }();
  return on;
}

std::optional<ConvPath> tuned_path(int device, const ConvKey& key) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Known& known = known_on(device);
  const auto found = known.find(key);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

std::optional<ConvPath> tune_path(int device, const ConvKey& key, const std::vector<ConvPath>& paths, void* stream,
                                  const std::function<void(ConvPath)>& run) {
  if (const std::optional<ConvPath> path = tuned_path(device, key)) return path;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(cuda_stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) {
    return std::nullopt;
  }
  const Relaxed relaxed;
  const std::vector<double> us = measure(paths, cuda_stream, run);
  std::optional<size_t> best;
  for (size_t i = 0; i < paths.size(); ++i) {
    if (us[i] >= 0 && (!best || us[i] < us[*best])) best = i;
  }
  if (!best) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex);
  Known& known = known_on(device);
  const std::string gpu = prefix.empty() ? "" : gpu_name(device);
  if (!prefix.empty()) read_file(gpu, &known);
  // Another thread or process may have measured the same meanwhile; the first answer holds, so that all take one path.
  const auto [kept, is_new] = known.emplace(key, paths[*best]);
  if (is_new && !prefix.empty()) write_file(gpu, known);
  return kept->second;
}

}  // namespace kgopt
