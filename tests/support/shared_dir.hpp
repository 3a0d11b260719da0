// Where the data that is not in this repository lies (golden vectors, models, texts), or that it is not there.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>

#include "catch.hpp"

#if !defined(KVSNIP_SHARED_DIR_DEFAULT)
#define KVSNIP_SHARED_DIR_DEFAULT "../shared"
#endif

namespace test {

/// The environment's KVSNIP_SHARED_DIR, else the build's default.
inline std::filesystem::path shared_dir() {
  const char* chosen = std::getenv("KVSNIP_SHARED_DIR");
  return chosen != nullptr ? chosen : KVSNIP_SHARED_DIR_DEFAULT;
}

/// `name` (a file or folder) in the shared folder. Without it the test is skipped: a line says so, and under CI, where
/// the data must be present, the test fails.
/// @param what  what is skipped, as the line names it
inline std::optional<std::filesystem::path> find_shared(const std::string& name, const std::string& what) {
  const std::filesystem::path found = shared_dir() / name;
  if (std::filesystem::exists(found)) return found;
  std::cout << "[skipped] " << what << ": no shared data at " << found.string() << '\n';
  if (std::getenv("CI") != nullptr) FAIL("CI must not skip " << what << ": no shared data at " << found.string());
  return std::nullopt;
}

}  // namespace test
