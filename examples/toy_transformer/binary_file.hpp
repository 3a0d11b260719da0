// A file read front to back. Its size is known from the start, so a reader can refuse what a header merely claims
// before allocating anything for it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

namespace toy {

static_assert(std::endian::native == std::endian::little, "the model files are little-endian and read as they are");

class BinaryFile {
 public:
  /// Throws std::runtime_error, one line that starts with the path, as all members do.
  explicit BinaryFile(const std::filesystem::path& path) : path_(path.string()) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    if (status.type() == std::filesystem::file_type::not_found) fail("no such file");
    if (status.type() != std::filesystem::file_type::regular) fail("not a regular file");  // a pipe has no size
    const std::uintmax_t size = std::filesystem::file_size(path, error);
    if (error || !std::in_range<std::int64_t>(size)) fail("cannot tell its size");
    remaining_ = static_cast<std::int64_t>(size);
    stream_.open(path, std::ios::binary);
    if (!stream_) fail("cannot be opened for reading");
  }

  std::int64_t remaining() const { return remaining_; }  ///< bytes not read yet

  void read(std::span<char> out) {
    if (static_cast<std::int64_t>(out.size()) > remaining_) fail("ends too early");
    if (out.empty()) return;
    stream_.read(out.data(), static_cast<std::streamsize>(out.size()));
    if (!stream_) fail("cannot be read");  // it shrank since we looked, or the disk failed
    remaining_ -= static_cast<std::int64_t>(out.size());
  }

  template <class Value>
    requires std::is_trivially_copyable_v<Value>
  Value read() {
    char bytes[sizeof(Value)];
    read(bytes);
    Value value;
    std::memcpy(&value, bytes, sizeof(Value));
    return value;
  }

  /// @param out  floats (count), overwritten
  void read_floats(float* out, std::int64_t count) {
    read(std::span<char>(reinterpret_cast<char*>(out), static_cast<std::size_t>(count) * sizeof(float)));
  }

  [[noreturn]] void fail(std::string_view reason) const {
    throw std::runtime_error(path_ + ": " + std::string(reason));
  }

 private:
  std::string path_;
  std::ifstream stream_;
  std::int64_t remaining_ = 0;
};

/// The whole of a text file, byte for byte.
inline std::string read_text(const std::filesystem::path& path) {
  BinaryFile file(path);
  std::string text(static_cast<std::size_t>(file.remaining()), '\0');
  file.read(text);
  return text;
}

}  // namespace toy
