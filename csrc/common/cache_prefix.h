// Where measurements are kept on disk.
#pragma once

#include <string>

namespace kgopt {

// Folder and beginning of the files' names, with the versions that a measurement holds for; empty: nowhere.
std::string cache_prefix();

}  // namespace kgopt
