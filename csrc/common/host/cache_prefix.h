// Where measurements are kept on disk.
#pragma once

#include <cstdint>
#include <string>

namespace kgopt {

// Folder and beginning of the files' names, with the versions that a measurement holds for; empty: nowhere.
std::string cache_prefix();

// A number that changes when everything that was measured is to be forgotten.
int64_t cache_generation();

}  // namespace kgopt
